// Copies of a corpus's shards on a disk of this node, made in the background while training reads:
// for corpora on a shared file system that is slower than the node's own disk.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "configs/schema/corpus_manifest.pb.h"

namespace birkhoff {

// data.stage.folder, with the value of the environment variable at its start ("$TMPDIR/corpus").
// Error(kUsage) if the variable is not set.
std::filesystem::path staging_folder(const std::string& text);

class StagedShards {
 public:
  // Starts the thread, which copies the shards of `corpus` in the manifest's order to
  // folder/<fingerprint>, at most max_bytes of them; 0 = all. Complete copies of earlier processes
  // are used. Processes that share a folder share the copies: one of them makes them, and another
  // goes on if that one ends. A shard whose bytes do not have the manifest's hash is not used. If
  // the disk is full, or the corpus cannot be read, no more shards are copied; one warning says so.
  StagedShards(const std::filesystem::path& corpus, const configs::CorpusManifest& manifest,
               const std::filesystem::path& folder, std::int64_t max_bytes);
  // Leaves an unfinished copy, which a later process starts again.
  ~StagedShards();
  StagedShards(const StagedShards&) = delete;
  StagedShards& operator=(const StagedShards&) = delete;

  // The complete copy of a shard file; empty if there is none yet. Any thread may call it.
  std::string copy_of(const std::string& file) const;
  // How many shards have complete copies: grows.
  std::int64_t num_copies() const { return num_copies_; }

 private:
  struct Shard {
    const configs::CorpusManifest::Shard* entry;
    std::atomic<bool> is_copied = false;
    explicit Shard(const configs::CorpusManifest::Shard& of) : entry(&of) {}
  };

  void run();
  // Finds the copies that are complete. Returns their bytes.
  std::int64_t find_copies();
  // Copies what is missing, as far as it fits, or until asked to end.
  void copy_missing(std::int64_t copied_bytes);
  // Error: the file system failed. False: asked to end.
  bool copy(Shard& shard);
  bool ends() const;

  const std::filesystem::path corpus_, folder_;
  const configs::CorpusManifest manifest_;
  const std::int64_t max_bytes_;
  std::vector<std::unique_ptr<Shard>> shards_;
  std::atomic<std::int64_t> num_copies_ = 0;
  mutable std::mutex mutex_;
  std::condition_variable ended_;
  bool ends_ = false;
  std::thread thread_;
};

}  // namespace birkhoff
