#include <iostream>

#include "launcher/app.h"

int main(int argc, char** argv) {
  return birkhoff::run_app(std::vector<std::string>(argv + 1, argv + argc), std::cout, std::cerr);
}
