#include "cluster/base/files/checksum.h"
#include "runtime/checkpoint/manifest.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_targets.h"

namespace birkhoff {

void fuzz_checkpoint_manifest(std::string_view input) {
  const std::string name = "checkpoints/step-00000001/manifest.json";
  const std::string text(input);
  is_accepted(ExitCode::kCheckpoint, [&] { parse_checkpoint_manifest(text, name); });

  if (!text.starts_with('{')) return;
  const std::string covered = text.substr(1);
  const std::string fitting =
      fmt::format("{{\"checksum\":\"{}\",{}", xxh3_hex(covered.data(), covered.size()), covered);
  configs::CheckpointManifest manifest;
  if (!is_accepted(ExitCode::kCheckpoint,
                   [&] { manifest = parse_checkpoint_manifest(fitting, name); })) {
    return;
  }
  const std::string written = manifest_text(manifest);
  expect_promise(manifest_text(parse_checkpoint_manifest(written, name)) == written,
                 "the manifest read is the manifest written");
}

}  // namespace birkhoff
