// Apart from damage.cpp because the two manifests' headers declare functions of one name.
#include <google/protobuf/util/json_util.h>

#include <stdexcept>

#include "damage.h"
#include "runtime/checkpoint_manifest.h"

namespace birkhoff {

void edit_checkpoint(const std::string& folder,
                     const std::function<void(configs::CheckpointManifest&)>& edit) {
  const std::string path = folder + "/manifest.json";
  configs::CheckpointManifest manifest;
  if (!google::protobuf::util::JsonStringToMessage(read_bytes(path), &manifest).ok())
    throw std::runtime_error(path);
  edit(manifest);
  write_bytes(path, manifest_text(manifest));
}

}  // namespace birkhoff
