// A folder for files that live as long as the command.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <string>

#include "cluster/base/files/file.h"

namespace birkhoff {

// In TMPDIR, else /tmp. A process of its own waits for the end of this one and removes the folder
// with all it holds, however the end comes: destruction, an error, Ctrl-C, SIGKILL.
class ScratchFolder {
 public:
  // name: the folder is birkhoff_<name>_<random>. Error(kStorage).
  explicit ScratchFolder(const std::string& name);
  ~ScratchFolder();  // returns when the folder is gone
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  UniqueHandle<FileDescriptorTraits> alive_;  // a pipe's end that closes with this process
  pid_t remover_ = -1;
};

}  // namespace birkhoff
