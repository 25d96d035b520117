#include "cluster/base/files/system_call.h"

#include <unistd.h>

#include <atomic>
#include <cstring>

namespace birkhoff {
namespace {

struct Hook {
  FileFaultHook function;
  std::atomic<std::int64_t> num_calls = 0;
};
std::atomic<Hook*> current_hook = nullptr;  // a plain pointer: nothing to destroy at exit

const char* cure(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      return "free space or quota there, or choose another folder";
    case EACCES:
    case EPERM:
    case EROFS:
      return "check owner and permissions, or choose another folder";
    case ENOENT:
    case ENOTDIR:
      return "check the path";
    case EEXIST:
    case ENOTEMPTY:
      return "remove it or choose another name";
    case EISDIR:
      return "a file is needed, not a folder";
    case ENXIO:
      return "a file is needed, not a socket, nor a pipe or device that has no peer";
    case EMFILE:
    case ENFILE:
      return "raise the limit of open files (ulimit -n)";
    case EFBIG:
      return "raise the limit of file sizes (ulimit -f)";
    case EIO:
      return "the device reports errors: check it, and write elsewhere until then";
    default:
      return "check the file system";
  }
}

// True if the input is not what its reader expects; false if the system cannot read it now: a
// temporary failure of a network file system must not look like a damaged checkpoint.
bool means_wrong_input(int error) {
  return error == ENOENT || error == ENOTDIR || error == EISDIR || error == ELOOP ||
         error == ENAMETOOLONG || error == ENXIO;
}

}  // namespace

void set_file_fault_hook(FileFaultHook hook) {
  delete current_hook.exchange(hook ? new Hook{std::move(hook)} : nullptr);
}

int next_fault(const char* call, const std::string& path) {
  Hook* hook = current_hook.load(std::memory_order_acquire);
  return hook == nullptr ? 0 : hook->function(call, path, hook->num_calls++);
}

void fail_call(const char* call, const std::string& path, const std::string& detail,
               ExitCode code) {
  const int error = errno;
  fail(means_wrong_input(error) ? code : ExitCode::kStorage, "{} of '{}' failed: {}{}; {}", call,
       path, std::strerror(error), detail, cure(error));
}

void check_call(std::int64_t result, const char* call, const std::string& path, ExitCode code) {
  if (result < 0) fail_call(call, path, "", code);
}

// Never repeated: after a failed fsync the kernel may mark lost pages as clean (mechanism and
// cases: Rebello et al. 2020, "Can applications recover from fsync failures?").
void sync_descriptor(int fd, const std::string& path) {
  int result = -1;
  if (const int fault = next_fault("fsync", path); fault > 0) {
    errno = fault;
  } else {
    result = ::fsync(fd);
  }
  if (result < 0 && errno == EINVAL) {  // of a folder, on CIFS and some FUSE file systems
    fail(ExitCode::kStorage,
         "fsync of '{}' failed: {}: its file system cannot make names durable; choose a folder on "
         "another file system",
         path, std::strerror(EINVAL));
  }
  if (result < 0) fail_call("fsync", path, ", so written data may be lost");
}

}  // namespace birkhoff
