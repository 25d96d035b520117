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

// The number of a closed standard descriptor would go to the next file that is opened; the program
// would then read that file as input or write messages into it. Opening /dev/null there in the
// wrong direction leaves the descriptor as unusable as it was.
void occupy_standard_descriptors() {
  for (int descriptor = 0; descriptor <= 2; ++descriptor) {
    if (fcntl(descriptor, F_GETFD) >= 0) continue;
    if (open("/dev/null", descriptor == 0 ? O_WRONLY : O_RDONLY) != descriptor) _exit(1);
  }
}

// Handles exceptions that nothing can catch, in a thread or before main(). Running out of memory
// still prints its line and has its exit code. The handler must not allocate memory then.
[[noreturn]] void end_uncaught() {
  try {
    if (const std::exception_ptr exception = std::current_exception()) {
      std::rethrow_exception(exception);
    }
  } catch (const std::bad_alloc&) {
    constexpr std::string_view kLine =
        "birkhoff: out of memory: raise the limit (ulimit -v), or use a smaller model\n";
    if (write(STDERR_FILENO, kLine.data(), kLine.size()) < 0) _exit(1);
    _exit(static_cast<int>(birkhoff::ExitCode::kMemory));
  } catch (...) {
    __gnu_cxx::__verbose_terminate_handler();
  }
  std::abort();
}

void handle_uncaught() { std::set_terminate(end_uncaught); }

// Runs before the initializers of shared libraries, because LibTorch's take most of the memory that
// a start needs.
[[gnu::used, gnu::section(".preinit_array")]] void (*const before_libraries)() = handle_uncaught;

}  // namespace

int main(int argc, char** argv) {
  occupy_standard_descriptors();
  // A write beyond the file size limit then fails with EFBIG, which is reported.
  std::signal(SIGXFSZ, SIG_IGN);
  // The supervisor repeats SIGUSR1, which must not kill the program before or after `train` handles
  // it.
  std::signal(SIGUSR1, SIG_IGN);
  // If the parent ignores SIGCHLD, it would stay ignored here, and the exit of children could not
  // be observed.
  std::signal(SIGCHLD, SIG_DFL);
  return birkhoff::run_app(std::vector<std::string>(argv + 1, argv + argc), std::cout, std::cerr);
}
