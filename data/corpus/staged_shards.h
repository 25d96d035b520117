// Copies of a corpus's shards on a disk of this node. A thread makes them while training reads.
// They help if the corpus is on a shared file system that is slower than the node's own disk.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>

#include "configs/schema/corpus_manifest.pb.h"

namespace birkhoff {

// The path that data.stage.folder names. If the text begins with an environment variable, as in
// "$TMPDIR/corpus", its value takes its place. Error(kUsage) if the variable is not set.
std::filesystem::path staging_folder(const std::string& text);

struct StageOptions {
  std::filesystem::path folder;
  std::int64_t max_bytes = 0;  // of all copies together; 0 = no limit
  // False: this process only uses copies that another process of the node makes.
  bool makes_copies = true;
};

// The copy of a shard, whether it exists yet or not. Any thread may use it.
struct StagedShard {
  std::string path;
  std::int64_t bytes = 0;
  std::string hash;  // of the shard, from the manifest
  // True once the copy is complete, until discard().
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
  // Waits at most a second for the thread, because it may hang on a lost file system. An unfinished
  // copy stays on the disk until copies are made again.
  ~StagedShards();
  StagedShards(const StagedShards&) = delete;
  StagedShards& operator=(const StagedShards&) = delete;

  // The copy of a file of the corpus; null if the file is not a shard of a stream or record. This
  // object owns the copy.
  StagedShard* find(const std::string& file) const;
  // How many copies are usable.
  std::int64_t num_usable() const;

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;  // shared with the thread
  std::thread thread_;
};

// Removes a copy that turned out to be damaged, and logs a warning that says why. From then on the
// corpus is read instead.
void discard(StagedShard& copy, const std::string& why);

}  // namespace birkhoff
