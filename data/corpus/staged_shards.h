// Copies of a corpus's shards on a disk of this node, made in the background while training reads:
// for corpora on a shared file system that is slower than the node's own disk.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>

#include "configs/schema/corpus_manifest.pb.h"

namespace birkhoff {

// data.stage.folder, with the value of the environment variable at its start ("$TMPDIR/corpus").
// Error(kUsage) if the variable is not set.
std::filesystem::path staging_folder(const std::string& text);

struct StageOptions {
  std::filesystem::path folder;
  std::int64_t max_bytes = 0;  // of all copies; 0 = no limit
  // One process of a node makes the copies, the others use them.
  bool makes_copies = true;
};

// The copy of a shard. Any thread may use it.
struct StagedShard {
  std::string path;
  std::int64_t bytes = 0;
  std::string hash;  // of the manifest
  // The copy is complete.
  std::atomic<bool> is_usable = false;
};

class StagedShards {
 public:
  // Starts a thread. It copies the shards of all streams and records in the manifest's order to
  // folder/<fingerprint>, where later processes find them. A shard whose bytes do not have the
  // manifest's hash is not copied. If the disk is full, or the corpus cannot be read, no more
  // shards are copied; one warning says so. Error(kStorage) if the folder cannot be made.
  StagedShards(const std::filesystem::path& corpus, const configs::CorpusManifest& manifest,
               const StageOptions& options);
  // Leaves an unfinished copy. Waits at most a second for the thread, which may hang on a lost file
  // system.
  ~StagedShards();
  StagedShards(const StagedShards&) = delete;
  StagedShards& operator=(const StagedShards&) = delete;

  // The copy of a shard file, which belongs to this object; null if the file is not one that is
  // copied.
  StagedShard* find(const std::string& file) const;
  // How many copies are usable.
  std::int64_t num_usable() const;

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;  // the thread has one, too
  std::thread thread_;
};

// The copy turned out to be damaged: removes it, with a warning that says why. The corpus is read
// instead.
void discard(StagedShard& copy, const std::string& why);

}  // namespace birkhoff
