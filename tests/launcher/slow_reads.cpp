// A library to preload: every pread takes longer, as on a slow file system that serves one read at
// a time: by a tenth of a second, or by BIRKHOFF_SLOW_READS milliseconds; until the file that
// BIRKHOFF_FAST_READS names exists. From the read on whose number is BIRKHOFF_HANGING_READS, each
// takes a minute.
#include <dlfcn.h>
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <thread>

extern "C" ssize_t pread64(int fd, void* buffer, size_t count, off64_t offset) {
  using Pread = ssize_t (*)(int, void*, size_t, off64_t);
  static const Pread real = reinterpret_cast<Pread>(dlsym(RTLD_NEXT, "pread64"));
  static const char *const delay = std::getenv("BIRKHOFF_SLOW_READS"),
                           *const fast = std::getenv("BIRKHOFF_FAST_READS"),
                           *const hanging = std::getenv("BIRKHOFF_HANGING_READS");
  static std::atomic<int> num_reads{0};
  const bool hangs = hanging != nullptr && ++num_reads >= std::atoi(hanging);
  if (fast == nullptr || access(fast, F_OK) != 0) {
    static std::mutex disk;
    const std::lock_guard lock(disk);
    const int usual = delay != nullptr ? std::atoi(delay) : 100;
    std::this_thread::sleep_for(std::chrono::milliseconds(hangs ? 60'000 : usual));
  }
  return real(fd, buffer, count, offset);
}

extern "C" ssize_t pread(int fd, void* buffer, size_t count, off_t offset) {
  return pread64(fd, buffer, count, offset);
}
