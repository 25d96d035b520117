#include "data/prepare/images/prepare_images.h"

#include "data/prepare/records/prepare_records.h"

namespace birkhoff {

PrepareResult prepare_images(const PrepareOptions& options, const ImageOptions& images,
                             const std::function<void(const PrepareProgress&)>& progress,
                             ProcessGroup* ranks) {
  const auto make = [&](const RecordInput::Context& context) {
    return std::make_unique<ImageInput>(images, context);
  };
  return prepare_records(options, images, kImageNouns, make, progress, ranks);
}

}  // namespace birkhoff
