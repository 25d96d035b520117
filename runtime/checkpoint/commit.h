// The file-system side of saving a checkpoint, on one rank and without communication. The order of
// calls is the protocol of docs/checkpoint_format.md:
//   all ranks  write_tensor_file() into .tmp-step-N-by-H (H: fencing number)
//   rank 0     commit_checkpoint(): index, manifest.json last, rename to step-N, then retention
// Names next to checkpoints: .tmp-* is unfinished or being deleted, .replaced-step-N is the old one
// while a step is saved again, damaged-step-N[-K] and diverged-step-N[-K] were set aside.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "configs/schema/checkpoint_manifest.pb.h"
#include "runtime/checkpoint/checkpoint.h"

namespace birkhoff {

inline constexpr std::string_view kStepPrefix = "step-";
inline constexpr std::string_view kReplacedPrefix = ".replaced-step-";
inline constexpr std::string_view kAsidePrefix = ".tmp-";
inline constexpr std::string_view kDamagedPrefix = "damaged-";
inline constexpr std::string_view kDivergedPrefix = "diverged-";

// "step-00000042"; at least 8 digits, so that names sort like steps.
std::string step_name(std::int64_t step);
// Renames to `name` in the same folder or, if that exists, to `name`-K with the first K >= 2 that
// is free. Returns the new path.
std::filesystem::path rename_to_free(const std::filesystem::path& path, const std::string& name);

// Path by step of every folder that may be a checkpoint: step-N, and .replaced-step-N if a crash
// came before the new step-N got its name. Empty if `checkpoints` does not exist.
std::map<std::int64_t, std::filesystem::path> list_checkpoints(
    const std::filesystem::path& checkpoints);

// A part to be written: its manifest entry, complete except for file and CRCs, and its bytes.
struct StagedTensor {
  configs::CheckpointManifest::Tensor entry;
  const std::byte* data = nullptr;
  std::int64_t num_bytes = 0;
};

// Writes one safetensors file of `tensors` in order, syncs it, reads it back and compares. Fills in
// file and CRCs of the entries. Checks `abandon` between pieces: once true, Error(kStorage).
// Errors name the file and the call.
configs::CheckpointManifest::File write_tensor_file(const std::filesystem::path& folder,
                                                    const std::string& name,
                                                    std::vector<StagedTensor>& tensors,
                                                    const std::atomic<bool>& abandon);

// Makes the files in `aside` the checkpoint `checkpoints`/step-N: writes `extra_files` (content by
// name), the index and the manifest (which already lists the ranks' files), reads it all back,
// renames, and removes the oldest checkpoints that `retention` does not keep. Returns the new
// folder. A crash or an error at any call leaves either the earlier checkpoints or the new one,
// intact. Files that cannot be removed are named in a warning, and tried again by the next call.
// Calls require_folder, which throws if another job has taken the run, just before it renames and
// just before it removes the oldest.
std::filesystem::path commit_checkpoint(const std::filesystem::path& checkpoints,
                                        const std::filesystem::path& aside,
                                        configs::CheckpointManifest manifest,
                                        const std::map<std::string, std::string>& extra_files,
                                        Retention retention,
                                        const std::function<void()>& require_folder = {});

// Removes the files of unfinished saves, or warns that it cannot, and renames .replaced-step-N back
// to step-N if there is no new step-N.
void remove_leftovers(const std::filesystem::path& checkpoints);
// Does only the renaming, for readers that resume from the existing checkpoints.
void restore_replaced(const std::filesystem::path& checkpoints);

}  // namespace birkhoff
