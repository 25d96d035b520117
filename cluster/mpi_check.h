// Status checks for MPI calls.
#pragma once

#include <mpi.h>

#include <source_location>

namespace birkhoff {

// Throws Error(kPeer) with MPI's text, the call and the source location unless status is
// MPI_SUCCESS. Communicators must have the error handler MPI_ERRORS_RETURN.
void mpi_check(int status, const char* call,
               std::source_location where = std::source_location::current());

}  // namespace birkhoff
