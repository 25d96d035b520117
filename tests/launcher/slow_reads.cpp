// A library to preload: every pread takes longer, as on a slow file system: a tenth of a second, and
// a minute from the read on whose number is in the variable READS_HANG_FROM.
#include <dlfcn.h>
#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>

extern "C" ssize_t pread64(int fd, void* buffer, size_t count, off64_t offset) {
  using Pread = ssize_t (*)(int, void*, size_t, off64_t);
  static const Pread real = reinterpret_cast<Pread>(dlsym(RTLD_NEXT, "pread64"));
  static const char* hang_from = std::getenv("READS_HANG_FROM");
  static std::atomic<int> num_reads{0};
  const bool hangs = hang_from != nullptr && ++num_reads >= std::atoi(hang_from);
  std::this_thread::sleep_for(std::chrono::milliseconds(hangs ? 60'000 : 100));
  return real(fd, buffer, count, offset);
}

extern "C" ssize_t pread(int fd, void* buffer, size_t count, off_t offset) {
  return pread64(fd, buffer, count, offset);
}
