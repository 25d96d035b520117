#include <fcntl.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <new>
#include <string_view>

#include "cluster/base/error.h"
#include "launcher/app.h"

namespace {

// The number of a standard descriptor that is closed would go to the next file that is opened: it
// would be read as input, or messages be written into it. Opened the wrong way round it stays as
// useless as it was.
void occupy_standard_descriptors() {
  for (int descriptor = 0; descriptor <= 2; ++descriptor) {
    if (fcntl(descriptor, F_GETFD) >= 0) continue;
    if (open("/dev/null", descriptor == 0 ? O_WRONLY : O_RDONLY) != descriptor) _exit(1);
  }
}

// What is thrown where nobody can catch it, in a thread or before main(): for want of memory it has
// its line and its exit code all the same. Without memory it may allocate nothing.
[[noreturn]] void end_uncaught() {
  try {
    if (const std::exception_ptr exception = std::current_exception()) {
      std::rethrow_exception(exception);
    }
  } catch (const std::bad_alloc&) {
    constexpr std::string_view kLine =
        "birkhoff: out of memory: raise its limit (ulimit -v), or use a smaller model\n";
    if (write(STDERR_FILENO, kLine.data(), kLine.size()) < 0) _exit(1);
    _exit(static_cast<int>(birkhoff::ExitCode::kMemory));
  } catch (...) {
    __gnu_cxx::__verbose_terminate_handler();
  }
  std::abort();
}

void handle_uncaught() { std::set_terminate(end_uncaught); }

// Before the initialisers of shared libraries: LibTorch's take most of the memory that a start
// needs.
[[gnu::used, gnu::section(".preinit_array")]] void (*const before_libraries)() = handle_uncaught;

}  // namespace

int main(int argc, char** argv) {
  occupy_standard_descriptors();
  // A write beyond the limit of file sizes fails with EFBIG, and says so.
  std::signal(SIGXFSZ, SIG_IGN);
  // The supervisor repeats SIGUSR1: before `train` notes it, and after, it must not kill.
  std::signal(SIGUSR1, SIG_IGN);
  // Ignored by the parent it would stay ignored here, and nothing could be learned of children.
  std::signal(SIGCHLD, SIG_DFL);
  return birkhoff::run_app(std::vector<std::string>(argv + 1, argv + argc), std::cout, std::cerr);
}
