#include <fcntl.h>
#include <unistd.h>

#include <csignal>
#include <iostream>

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
