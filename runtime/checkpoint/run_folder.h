// The folder of one training run: its files, its identity, and the job that may write it.
//
//   RUN/run.json       identity of the run, and whether it ever had a checkpoint
//   RUN/lock           locked (flock) while a job trains here; names the holder
//   RUN/holder-N       the lease of the N-th job that trains here (cluster/base/files/lease.h)
//   RUN/config.txtpb   the resolved configuration
//   RUN/history.jsonl, RUN/status.json  the past of the run (reporting/run_history.h)
//   RUN/metrics.jsonl, RUN/loss.svg, RUN/log/rank-*.log, RUN/checkpoints/step-*/
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "cluster/base/files/file.h"
#include "cluster/base/files/lease.h"
#include "runtime/checkpoint/checkpoint.h"

namespace birkhoff {

// Names of the files in a run's folder. Touches nothing; for every rank and every command.
struct RunPaths {
  std::filesystem::path root;

  std::filesystem::path identity() const { return root / "run.json"; }
  std::filesystem::path lock() const { return root / "lock"; }
  std::filesystem::path config() const { return root / "config.txtpb"; }
  std::filesystem::path history() const { return root / "history.jsonl"; }
  std::filesystem::path status() const { return root / "status.json"; }
  std::filesystem::path metrics() const { return root / "metrics.jsonl"; }
  std::filesystem::path loss_plot() const { return root / "loss.svg"; }
  std::filesystem::path log_folder() const { return root / "log"; }
  std::filesystem::path log(int rank) const;
  std::filesystem::path checkpoints() const { return root / "checkpoints"; }
};

// The process that trains in the folder, by its lock or, where flock means nothing between
// machines, by its lease. Changes nothing.
std::optional<std::string> run_holder(const RunPaths& paths);

// The right to train in a folder, held by rank 0 as long as this object exists. Local.
class RunFolder {
 public:
  // Creates the folder, or opens the run in it, and locks it. With `fresh`, the files of an earlier
  // run are first moved to RUN/before-fresh-K, so that nothing is lost. If another job held it and
  // may be gone, this waits until its lease expires, and removes the files of its unfinished saves,
  // so that they fail if it still runs. Error(kUsage): not a run's folder and not empty; held by
  // another job (names its host and process). Error(kStorage): cannot be created or written.
  RunFolder(const std::filesystem::path& folder, std::uint64_t seed, bool fresh);

  // Error(kUsage) if `folder` exists and neither is nor can become a run's. Changes nothing.
  static void check_usable(const std::filesystem::path& folder);

  const RunPaths& paths() const { return paths_; }
  // The lease by which this job holds the folder: check() throws FolderLost if it no longer does.
  const Lease& lease() const { return *lease_; }
  // XXH3-128 (hex), made when the folder was created; CheckpointManifest.run of all its
  // checkpoints.
  const std::string& id() const { return id_; }

  // The checkpoint to resume from: the newest valid one (damaged ones are reported on stderr and
  // set aside), or nullopt if the run starts at step 0 because it never had a checkpoint.
  // Error(kCheckpoint), with the cure, if there were checkpoints and none is valid, or if the
  // newest belongs to another run. `verify`: as find_newest_checkpoint().
  std::optional<CheckpointFolder> find_resume_point(
      const CheckpointVerifier& verify = verify_checkpoint);

  // Records that the run has a checkpoint, so that losing it is never mistaken for a new run. Call
  // after each commit; only the first call writes.
  void note_checkpoint();

  // Cuts metrics.jsonl to its first `bytes` bytes (CheckpointManifest.metrics_bytes, 0 at the
  // start), and to whole lines if the file is shorter. Always writes a new file: a job that lost
  // the folder may still have the old one open.
  void cut_metrics(std::int64_t bytes) const;

 private:
  void read_identity();
  void write_identity() const;

  RunPaths paths_;
  std::string id_;
  bool has_checkpoint_ = false;
  std::optional<FileLock> lock_;  // none: it is kept by a machine that seems to be gone
  std::optional<Lease> lease_;
};

}  // namespace birkhoff
