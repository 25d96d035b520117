// The folder that prepare makes: its lock, the files that an earlier command left in it, and copies
// of input that can be read only once.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "cluster/base/files/file.h"
#include "data/prepare/input/documents.h"
#include "data/prepare/prepare_progress.h"

namespace birkhoff {

// The output folder: its existing content decides what prepare does.
class OutFolder {
 public:
  // Makes the folder if it is missing.
  explicit OutFolder(std::string path);

  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }
  // Whether the folder was already a corpus when the command began.
  bool finished() const { return finished_; }

  // Rejects an input that is the folder itself or lies directly in it, because it might be removed.
  // Error(kUsage).
  void require_outside(const std::string& input) const;

  // Unless the folder is a finished corpus, takes the lock. The leftovers of an unfinished command
  // stay.
  void begin();
  // Removes these leftovers, except the files with the names in `keep`. Does nothing in a finished
  // corpus.
  void clear(const std::set<std::string>& keep = {}) const;

  // Copies inputs that cannot be read twice (standard input, pipes) into the folder, or only hashes
  // them if the corpus is finished. Other inputs stay where they are. The copies have no names, so
  // they disappear when this object or the process ends.
  void spool(std::vector<InputPath>& inputs, ProgressReports& progress);

  // Call once the manifest exists. Removes the files that only an unfinished folder has.
  void end();

 private:
  bool has_manifest() const;
  void require_only_leftovers() const;
  void spool_one(InputPath& input, std::size_t number, ProgressReports& progress);

  std::string path_;
  bool finished_ = false;
  std::optional<FileLock> lock_;
  std::vector<File> copies_;  // of streams
};

}  // namespace birkhoff
