#include "launcher/processes/shared_memory_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using Descriptor = UniqueHandle<FileDescriptorTraits>;

bool lock(int descriptor) { return flock(descriptor, LOCK_EX | LOCK_NB) == 0; }

// A failure is ignored, because it must not keep a run from starting or ending.
void remove_if_possible(const std::string& path) {
  std::error_code error;
  fs::remove_all(path, error);
}

// Removes this user's folders whose names begin with `start` and that no process has locked.
void remove_abandoned(const std::string& parent, const std::string& start) {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(parent, error)) {
    const std::string path = entry.path();
    if (!path.starts_with(start)) continue;
    const Descriptor folder(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    struct stat status;
    const bool ours = folder && fstat(folder.get(), &status) == 0 && status.st_uid == geteuid();
    if (ours && lock(folder.get())) remove_if_possible(path);
  }
}

}  // namespace

SharedMemoryFolder::SharedMemoryFolder(std::string parent) {
  const std::string start = fmt::format("{}/birkhoff-{}-", parent, geteuid());
  remove_abandoned(parent, start);
  constexpr int kTries = 10;  // until it is locked, another start may consider it abandoned
  for (int i = 0; i < kTries && !make(start); ++i) path_.clear();
}

SharedMemoryFolder::~SharedMemoryFolder() {
  if (!path_.empty()) remove_if_possible(path_);
}

bool SharedMemoryFolder::make(const std::string& start) {
  path_ = start + "XXXXXX";
  if (mkdtemp(path_.data()) == nullptr) return false;
  lock_.reset(open(path_.c_str(), O_RDONLY | O_DIRECTORY));
  struct stat status;
  return lock_ && lock(lock_.get()) && fstat(lock_.get(), &status) == 0 && status.st_nlink > 0;
}

}  // namespace birkhoff
