// The folder that prepare makes: its lock, what an earlier command left in it, and copies of input
// that can be read only once.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cluster/base/files/file.h"
#include "data/prepare/documents.h"
#include "data/prepare/prepare_progress.h"

namespace birkhoff {

// What the folder holds already decides what happens.
class OutFolder {
 public:
  // Made if it is missing.
  explicit OutFolder(std::string path);

  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }
  // The folder was a corpus already when the command began.
  bool finished() const { return finished_; }

  // The folder itself, and what lies directly in it, is no input: it might be removed.
  // Error(kUsage).
  void require_outside(const std::string& input) const;

  // Takes the lock and removes what an unfinished command left, if the folder is not a finished
  // corpus.
  void begin();

  // Inputs that cannot be read twice (standard input, pipes) are copied into the folder, or only
  // hashed if the corpus is finished; the others stay where they are. The copies have no names, so
  // that nothing is left of them when this object or the process ends.
  void spool(std::vector<InputPath>& inputs, ProgressReports& progress);

  // There is a manifest now: removes what only an unfinished folder has.
  void end();

 private:
  bool has_manifest() const;
  void require_only_leftovers() const;
  void remove_leftovers() const;
  void spool_one(InputPath& input, std::size_t number, ProgressReports& progress);

  std::string path_;
  bool finished_ = false;
  std::optional<FileLock> lock_;
  std::vector<File> copies_;  // of streams
};

}  // namespace birkhoff
