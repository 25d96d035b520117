// The program `birkhoff` as a function: command line in, output and exit code out. Tests call it in
// their own process.
#pragma once

#include <ostream>
#include <string>
#include <vector>

namespace birkhoff {

// Runs one command line (without the program's name). Data goes to `out`, messages to `err`; every
// error becomes one line on `err` and its documented exit code (docs/runbook.md). `train` may start
// MPI, which a process can do only once.
int run_app(const std::vector<std::string>& arguments, std::ostream& out, std::ostream& err);

// Versions of the program and of everything that it links, one a line: "birkhoff 0.1.0", then the
// compiler, LibTorch, CUDA, MPI and the other libraries.
std::string version_text();

}  // namespace birkhoff
