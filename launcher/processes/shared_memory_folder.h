// Where the ranks that this machine's supervisor starts put the memory they share.
#pragma once

#include <string>

#include "cluster/base/files/file.h"

namespace birkhoff {

// A folder birkhoff-UID-* in /dev/shm, for one run. The destructor removes it; where that does not
// happen because the supervisor was killed, the next object made by this user does: a lock on the
// folder tells whether its supervisor or mpirun lives.
class SharedMemoryFolder {
 public:
  // parent: another folder for tests.
  explicit SharedMemoryFolder(std::string parent = "/dev/shm");
  ~SharedMemoryFolder();
  SharedMemoryFolder(const SharedMemoryFolder&) = delete;
  SharedMemoryFolder& operator=(const SharedMemoryFolder&) = delete;

  // Empty where none could be made: Open MPI then has places of its own.
  const std::string& path() const { return path_; }

 private:
  bool make(const std::string& start);

  std::string path_;
  // Inherited by mpirun, which holds the lock for as long as it lives.
  UniqueHandle<FileDescriptorTraits> lock_;
};

}  // namespace birkhoff
