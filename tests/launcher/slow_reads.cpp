// A library to preload: every pread takes a tenth of a second longer, as on a slow file system.
#include <dlfcn.h>
#include <sys/types.h>

#include <chrono>
#include <thread>

extern "C" ssize_t pread64(int fd, void* buffer, size_t count, off64_t offset) {
  using Pread = ssize_t (*)(int, void*, size_t, off64_t);
  static const Pread real = reinterpret_cast<Pread>(dlsym(RTLD_NEXT, "pread64"));
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  return real(fd, buffer, count, offset);
}

extern "C" ssize_t pread(int fd, void* buffer, size_t count, off_t offset) {
  return pread64(fd, buffer, count, offset);
}
