// A folder for files that are needed only while the command runs.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <string>

#include "cluster/base/files/file.h"

namespace birkhoff {

// A folder in TMPDIR, else /tmp. A separate process waits for the end of this object or process and
// then removes the folder with its contents, however the end comes: destruction, an error, Ctrl-C,
// SIGKILL.
class ScratchFolder {
 public:
  // name: the folder is birkhoff_<name>_<random>. Error(kStorage), or Error(kMemory) if the process
  // cannot start.
  explicit ScratchFolder(const std::string& name);
  ~ScratchFolder();  // returns when the folder is gone
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  UniqueHandle<FileDescriptorTraits> alive_;  // the end of a pipe, which closes with this process
  pid_t remover_ = -1;
};

}  // namespace birkhoff
