// Versions of the program and of everything that it links, one a line: "birkhoff 0.1.0", then the
// compiler, LibTorch, CUDA, MPI and the other libraries. `birkhoff --version` prints it, reports of
// measurements begin with it, and ranks compare it.
#pragma once

#include <string>

namespace birkhoff {

std::string version_text();

}  // namespace birkhoff
