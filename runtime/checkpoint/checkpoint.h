// Checkpoints: written aside by a thread, verified, committed by a rename, found again by reading
// manifests. docs/checkpoint_format.md describes the files and what a crash at any point leaves.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cluster/base/collectives/group.h"
#include "configs/checkpoint_manifest.pb.h"
#include "runtime/checkpoint/named_shard.h"

namespace birkhoff {

// Everything of a checkpoint besides tensors: manifest fields program, config, run, step, consumed,
// tokens, skipped, evaluation_due, held_out_loss, corpus, tokenizer, vocabulary, bytes_per_token,
// metrics_bytes. save() fills the rest.
using CheckpointHeader = configs::CheckpointManifest;

// Which checkpoints stay when a new one is committed.
struct Retention {
  Retention(int newest_count, bool best_too = false) : newest(newest_count), best(best_too) {}

  int newest;  // so many, at least 1
  bool best;   // and the one with the least held_out_loss, the oldest of equals
};

class CheckpointWriter {
 public:
  // Saves into `folder`/step-NNNNNNNN. `extra_files` (the tokenizer's model) are part of each
  // checkpoint, as rank 0 reads them here: what becomes of them later does not matter. Rank 0
  // removes what an unfinished save left. Local. `world` is used at step borders only, never by the
  // thread that writes, and must outlive the writer.
  CheckpointWriter(std::filesystem::path folder, Retention retention,
                   std::vector<std::filesystem::path> extra_files, Group& world);
  // Joins the thread. An unfinished save is abandoned (its folder stays aside and is removed at the
  // next start).
  ~CheckpointWriter();

  // Copies the data of the shards that this rank owns and lets a thread write them. Collective over
  // world. If a save is still running it is finished first. Owners must differ for equal shards,
  // and all shards of a tensor together must hold each element once (checked before the commit).
  // The header counts on rank 0 only.
  void save(const CheckpointHeader& header, const std::vector<NamedShard>& shards);
  // At a step's border: ranks vote on a running save and commit it when all have written. Returns
  // the folder committed in this call. A failed write fails here, on all ranks, with an Error that
  // names rank, file, call and cure (kStorage for the file system); earlier checkpoints are
  // untouched then. Collective over world; no communication while no save runs.
  std::optional<std::filesystem::path> poll();
  // Waits, without spinning, until nothing is running; returns the folder committed in this call.
  // Collective over world.
  std::optional<std::filesystem::path> finish();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// A checkpoint folder whose manifest was read and whose file sizes fit.
struct CheckpointFolder {
  std::filesystem::path path;
  configs::CheckpointManifest manifest;
};

// Reads and checks `path`/manifest.json: format, version, every file there with its size.
// Error(kCheckpoint) says what is wrong.
CheckpointFolder open_checkpoint(const std::filesystem::path& path);

// The newest valid checkpoint below a run's `checkpoints` folder, fully verified (all hashes). A
// damaged one is named on stderr and the one before it tried. None there, now or ever: nullopt.
// There were some but none is valid: Error(kCheckpoint). Local: call it on one rank.
//
// With `set_aside`, to train on from it: damaged ones are renamed to damaged-step-N, so that they
// are neither used nor lost. So are those that earlier versions saved while a run diverged, steps
// being skipped or values not finite, to diverged-step-N; one warning names them.
std::optional<CheckpointFolder> find_newest_checkpoint(const std::filesystem::path& folder,
                                                       bool set_aside);

// Fills the shards' data from the checkpoint, whatever mesh wrote it; every byte read is checked.
// Local. Missing, surplus or misfit tensors: Error(kCheckpoint) with the tensor's name. A rank that
// holds no element of some tensor names it with an empty shard, so that surplus ones are noticed.
void load_checkpoint(const CheckpointFolder& checkpoint, std::vector<NamedShard>& shards);
// Parameters only (evaluation, sampling): tensors of the checkpoint that no shard names are
// ignored.
void load_parameters(const CheckpointFolder& checkpoint, std::vector<NamedShard>& shards);

// Re-reads every file: sizes, hashes, safetensors headers, CRC32C of every tensor.
// Error(kCheckpoint) names the first file and tensor that differ.
void verify_checkpoint(const CheckpointFolder& checkpoint);

// What `birkhoff inspect` prints: step, tokens, configuration in short, files with sizes, a table
// of the parameters.
std::string describe_checkpoint(const CheckpointFolder& checkpoint);

}  // namespace birkhoff
