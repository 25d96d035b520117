#include <csignal>
#include <iostream>

#include "launcher/app.h"

int main(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // a write beyond the limit of file sizes fails with EFBIG, and says so
  return birkhoff::run_app(std::vector<std::string>(argv + 1, argv + argc), std::cout, std::cerr);
}
