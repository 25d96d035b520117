// The output of small programs, such as Slurm's commands.
#pragma once

#include <chrono>
#include <cstddef>
#include <limits>
#include <string>
#include <vector>

namespace birkhoff {

struct CommandOutput {
  int code = -1;  // exit code; 128 + n if ended by signal n; -1 if it was killed for being too slow
  std::string out, err;  // what it printed to stdout and stderr
};

// Runs line[0], found in PATH, with the other parts as arguments: no shell reads them. stdin is
// empty. A program that cannot be started ends with 127.
CommandOutput output_of(const std::vector<std::string>& line, std::chrono::milliseconds limit);

// The same for several programs that run at the same time. Once `wanted` of them have printed
// something, the rest have two more seconds.
std::vector<CommandOutput> outputs_of(const std::vector<std::vector<std::string>>& lines,
                                      std::chrono::milliseconds limit,
                                      std::size_t wanted = std::numeric_limits<std::size_t>::max());

// The command line of squeue without its header. Environment variables with which users filter
// squeue's output are not passed on.
std::vector<std::string> squeue(const std::vector<std::string>& options);

}  // namespace birkhoff
