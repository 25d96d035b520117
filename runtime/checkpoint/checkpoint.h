// Checkpoints: a thread writes them into a temporary folder, verifies them and commits them with a
// rename; readers find them by their manifests. docs/checkpoint_format.md describes the files and
// what a crash at any point leaves.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cluster/base/collectives/process_group.h"
#include "configs/schema/checkpoint_manifest.pb.h"
#include "runtime/checkpoint/tensor_part.h"

namespace birkhoff {

// Everything in a checkpoint except tensors. The caller describes the run, its state, the corpus
// and the tokenizer; save() fills in format, version, ranks, files, tensors and the checksum.
using CheckpointHeader = configs::CheckpointManifest;

// The checkpoints to keep when a new one is committed.
struct Retention {
  Retention(int newest_count, bool best_too = false) : newest(newest_count), best(best_too) {}

  int newest;  // number of the newest to keep, at least 1
  // Also keep the checkpoint with the lowest held_out_loss (the oldest of equal ones): one for each
  // evaluated_data() (configs/loader/check.h).
  bool best;
};

class CheckpointWriter {
 public:
  // Gets the name of the first tensor, in the order of ranks, with a value that is not finite.
  using NotFinite = std::function<void(const std::string& tensor)>;

  // Saves into `folder`/step-NNNNNNNN. `extra_files` (the tokenizer's model) are part of each
  // checkpoint. Rank 0 reads them here, so later changes to them have no effect. Rank 0 removes the
  // files of unfinished saves. Local. `world` is used only between steps, never by the writing
  // thread, and must outlive the writer. `require_folder` throws FolderLost if another job has
  // taken the run (cluster/base/files/lease.h); it is called on rank 0, also by the writing thread.
  CheckpointWriter(std::filesystem::path folder, Retention retention,
                   std::vector<std::filesystem::path> extra_files, ProcessGroup& world,
                   std::function<void()> require_folder = {});
  // Joins the thread. An unfinished save is abandoned: its temporary folder is removed at the next
  // start.
  ~CheckpointWriter();

  // Copies the data of the parts that this rank owns; a thread writes them. Collective over world.
  // If a save is still running, it is finished first. Ranks that hold equal parts must name the
  // same owner, and all parts of a tensor together must hold each element once (checked before the
  // commit). Only rank 0's header is used. If a value is not finite, all ranks call `not_finite`
  // before anything is written; it may throw.
  void save(const CheckpointHeader& header, const std::vector<TensorPart>& parts,
            const NotFinite& not_finite = {});
  // Call between steps: ranks vote on a running save and commit it once all have written. Returns
  // the folder committed in this call. If a write failed, this throws on all ranks an Error that
  // names rank, file, call and cure (kStorage if the file system failed); earlier checkpoints stay
  // as they were. Collective over world; no communication while no save runs.
  std::optional<std::filesystem::path> poll();
  // Waits, without spinning, until no save is running; returns the folder committed in this call.
  // Collective over world.
  std::optional<std::filesystem::path> finish();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// A checkpoint folder whose manifest was read and whose file sizes match it.
struct CheckpointFolder {
  std::filesystem::path path;
  configs::CheckpointManifest manifest;
};

// Reads and checks `path`/manifest.json: format, version, and that every file exists with its size.
// Error(kCheckpoint) says what is wrong.
CheckpointFolder open_checkpoint(const std::filesystem::path& path);

// Verifies all files of a checkpoint: sizes, hashes, safetensors headers, and the CRC32C of every
// tensor. Returns the name of the first tensor that holds a non-finite value; empty if none does.
// Error(kCheckpoint) names the first file and tensor that differ.
using CheckpointVerifier = std::function<std::string(const CheckpointFolder&)>;
// The verifier that reads every file in this process. Local.
std::string verify_checkpoint(const CheckpointFolder& checkpoint);

// The newest valid checkpoint in a run's `checkpoints` folder, fully verified (all hashes). A
// damaged one is reported on stderr and the one before it is tried. Returns nullopt if the folder
// never had a checkpoint; Error(kCheckpoint) if it had some but none is valid. Call it on one rank.
// It communicates only if `verify` does.
//
// `set_aside`: for a run that resumes training. Damaged checkpoints are then renamed to
// damaged-step-N, so that they are neither used nor lost. Checkpoints that earlier versions saved
// while a run was diverging (steps were being skipped, or values were not finite) are renamed to
// diverged-step-N; one warning names them.
std::optional<CheckpointFolder> find_newest_checkpoint(
    const std::filesystem::path& folder, bool set_aside,
    const CheckpointVerifier& verify = verify_checkpoint);

// Fills the parts' data from the checkpoint, whatever mesh wrote it; every byte read is checked.
// Local. Error(kCheckpoint) with the tensor's name if a tensor is missing, surplus or mismatched. A
// tensor of the checkpoint that no part names is surplus, so a rank that holds no element of a
// tensor must list an empty part of it.
void load_checkpoint(const CheckpointFolder& checkpoint, std::vector<TensorPart>& parts);
// Loads only a model (evaluation, sampling): tensors of the checkpoint that no part names are
// ignored.
void load_model_tensors(const CheckpointFolder& checkpoint, std::vector<TensorPart>& parts);

// The text that `birkhoff inspect` prints: step, tokens, a short form of the configuration, files
// with sizes, a table of the parameters.
std::string describe_checkpoint(const CheckpointFolder& checkpoint);

}  // namespace birkhoff
