// Processes by an environment variable that they were started with, and that those they start
// inherit: who their parents are by now does not matter.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace birkhoff {

// Kills all other processes of this machine that were started with the variable ("NAME=VALUE"), and
// waits until they are gone. Returns those that have not gone in ten seconds: killed, but waiting
// for a file system or a device.
std::vector<pid_t> end_marked_processes(const std::string& variable);

}  // namespace birkhoff
