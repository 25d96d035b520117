#include "cluster/mpi_check.h"

#include <string>

#include "cluster/base/error.h"

namespace birkhoff {

void mpi_check(int status, const char* call, std::source_location where) {
  if (status == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(status, text, &length);
  fail(ExitCode::kPeer,
       "{} failed: {} ({}:{}); a rank or the network is lost: see the logs of the other ranks",
       call, std::string(text, static_cast<std::size_t>(length)), where.file_name(), where.line());
}

}  // namespace birkhoff
