// main() of GoogleTest programs that run on several MPI ranks: add mpi_test_main.cpp to the test's
// sources. Every rank runs the same tests in the same order; a failure on any rank fails the
// program.
#pragma once

#include "cluster/world.h"

namespace birkhoff {

// The World of the program. It exists from before the first test until after the last.
World& test_world();

}  // namespace birkhoff
