// A library to preload: faults of hosts and files on single ranks. RANK_FAULTS lists them, for
// instance "1:fsync 2:clock=120 2:host=node2":
//   host=NAME     the host's name
//   clock=N       the clock is N seconds ahead
//   cores=1       the process may use only one core
//   space=N       file systems have N bytes free
//   boot          another machine (boot_id)
//   connect       no connection can be made
//   fsync, rename, pread   the call fails with EIO
//   quota         a write of a block fails with EDQUOT
//   readonly      no file or folder of a trial can be created
//   blind         the trial folder of rank 0 is not there
//   flock         locks are granted to all
//   cma           the memory of other processes cannot be read, by MPI either
//   slow          the process runs for a fifth of the time
//   delay=N       a pread takes N ms longer
// Other calls fail only in the program itself, not in MPI.
#include <dlfcn.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/auxv.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>

namespace {

// The value of this rank's fault, "" for a fault without one; nullptr if the rank does not have it.
const char* fault(const char* name) {
  static thread_local std::string value;
  const char *rank = std::getenv("OMPI_COMM_WORLD_RANK"), *all = std::getenv("RANK_FAULTS");
  if (rank == nullptr || all == nullptr) return nullptr;
  const std::string text = std::string(" ") + all + " ",
                    wanted = std::string(" ") + rank + ":" + name;
  const std::size_t at = text.find(wanted);
  if (at == std::string::npos) return nullptr;
  const std::size_t end = text.find(' ', at + 1), begin = at + wanted.size();
  if (text[begin] != '=' && text[begin] != ' ') return nullptr;
  value = text[begin] == '=' ? text.substr(begin + 1, end - begin - 1) : "";
  return value.c_str();
}

bool is_of_program(const void* caller) {
  Dl_info of_caller{}, of_program{};
  // NOLINTNEXTLINE(performance-no-int-to-ptr): the address is a number there
  const auto* entry = reinterpret_cast<const void*>(getauxval(AT_ENTRY));
  return dladdr(caller, &of_caller) != 0 && dladdr(entry, &of_program) != 0 &&
         of_caller.dli_fbase == of_program.dli_fbase;
}

template <typename Function>
Function next(Function, const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

int fails(int error) {
  errno = error;
  return -1;
}

bool is_trial(const char* path) { return std::strstr(path, ".birkhoff-doctor-") != nullptr; }

// Stops this process for four fifths of the time, until it ends.
[[gnu::constructor]] void slow_down() {
  if (fault("slow") == nullptr) return;
  const pid_t victim = getpid();
  if (fork() != 0) return;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  for (const int number : {SIGINT, SIGTERM, SIGUSR1}) std::signal(number, SIG_IGN);  // for the rank
  while (getppid() == victim) {
    kill(victim, SIGSTOP);
    usleep(20'000);
    kill(victim, SIGCONT);
    usleep(5'000);
  }
  _exit(0);
}

}  // namespace

#define FROM_PROGRAM is_of_program(__builtin_return_address(0))

extern "C" {

int gethostname(char* name, size_t size) noexcept {
  if (const char* host = fault("host")) {
    std::strncpy(name, host, size);
    return 0;
  }
  return next(&gethostname, "gethostname")(name, size);
}

int clock_gettime(clockid_t clock, timespec* time) noexcept {
  const int result = next(&clock_gettime, "clock_gettime")(clock, time);
  if (clock != CLOCK_REALTIME) return result;
  if (const char* seconds = fault("clock")) time->tv_sec += std::atoi(seconds);
  return result;
}

int sched_getaffinity(pid_t pid, size_t size, cpu_set_t* set) noexcept {
  const int result = next(&sched_getaffinity, "sched_getaffinity")(pid, size, set);
  if (FROM_PROGRAM && fault("cores") != nullptr) {
    std::memset(set, 0, size);
    CPU_SET(0, set);
  }
  return result;
}

int statvfs(const char* path, struct statvfs* status) noexcept {
  const int result = next(&statvfs, "statvfs")(path, status);
  if (const char* bytes = fault("space"); FROM_PROGRAM && bytes != nullptr) {
    status->f_bavail = std::strtoull(bytes, nullptr, 10) / status->f_frsize;
  }
  return result;
}

int open(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  if (FROM_PROGRAM) {
    if (is_trial(path) && (flags & O_CREAT) != 0 && fault("readonly") != nullptr) {
      return fails(EROFS);
    }
    if (is_trial(path) && fault("blind") != nullptr) return fails(ENOENT);
    if (std::strstr(path, "boot_id") != nullptr && fault("boot") != nullptr) {
      path = "/proc/sys/kernel/random/uuid";
    }
  }
  return next(&open, "open")(path, flags, mode);
}

int mkdir(const char* path, mode_t mode) noexcept {
  if (FROM_PROGRAM && is_trial(path) && fault("readonly") != nullptr) return fails(EROFS);
  return next(&mkdir, "mkdir")(path, mode);
}

int stat(const char* path, struct stat* status) noexcept {
  if (FROM_PROGRAM && is_trial(path) && fault("blind") != nullptr) return fails(ENOENT);
  return next(&stat, "stat")(path, status);
}

ssize_t write(int fd, const void* data, size_t size) {
  if (size > 4096 && FROM_PROGRAM && fault("quota") != nullptr) return fails(EDQUOT);
  return next(&write, "write")(fd, data, size);
}

ssize_t pread(int fd, void* data, size_t size, off_t offset) {
  if (FROM_PROGRAM && fault("pread") != nullptr) return fails(EIO);
  const char* delay = FROM_PROGRAM ? fault("delay") : nullptr;
  if (delay != nullptr) usleep(1000 * static_cast<useconds_t>(std::atoi(delay)));
  return next(&pread, "pread")(fd, data, size, offset);
}

int fsync(int fd) {
  if (FROM_PROGRAM && fault("fsync") != nullptr) return fails(EIO);
  return next(&fsync, "fsync")(fd);
}

int rename(const char* from, const char* to) noexcept {
  if (FROM_PROGRAM && fault("rename") != nullptr) return fails(EIO);
  return next(&rename, "rename")(from, to);
}

int flock(int fd, int operation) noexcept {
  if (FROM_PROGRAM && fault("flock") != nullptr) return 0;
  return next(&flock, "flock")(fd, operation);
}

ssize_t process_vm_readv(pid_t process, const iovec* local, unsigned long num_local,
                         const iovec* remote, unsigned long num_remote,
                         unsigned long flags) noexcept {
  if (fault("cma") != nullptr) return fails(EPERM);
  return next(&process_vm_readv, "process_vm_readv")(process, local, num_local, remote, num_remote,
                                                     flags);
}

int connect(int socket, const sockaddr* address, socklen_t size) {
  if (FROM_PROGRAM && fault("connect") != nullptr) return fails(ECONNREFUSED);
  return next(&connect, "connect")(socket, address, size);
}

}  // extern "C"
