// The folder for the shared memory of the ranks that a supervisor starts on this machine.
#pragma once

#include <string>

#include "cluster/base/files/file.h"

namespace birkhoff {

// A folder birkhoff-UID-* in /dev/shm, for one run. The destructor removes it. If the supervisor
// was killed, the next object of this user removes it: a lock on the folder shows whether its
// supervisor or mpirun still runs.
class SharedMemoryFolder {
 public:
  // parent: another folder for tests.
  explicit SharedMemoryFolder(std::string parent = "/dev/shm");
  ~SharedMemoryFolder();
  SharedMemoryFolder(const SharedMemoryFolder&) = delete;
  SharedMemoryFolder& operator=(const SharedMemoryFolder&) = delete;

  // Empty if no folder could be created; Open MPI then uses its own folders.
  const std::string& path() const { return path_; }

 private:
  bool make(const std::string& start);

  std::string path_;
  // mpirun inherits it and holds the lock as long as it runs.
  UniqueHandle<FileDescriptorTraits> lock_;
};

}  // namespace birkhoff
