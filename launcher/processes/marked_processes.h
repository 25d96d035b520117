// Processes that were started with a given environment variable, and their children, which inherit
// it, whatever their current parents are.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace birkhoff {

// Kills all other processes on this machine that were started with the variable ("NAME=VALUE"), and
// waits until they are gone. Returns those that remain after ten seconds: they are killed but wait
// for a file system or a device.
std::vector<pid_t> end_marked_processes(const std::string& variable);

}  // namespace birkhoff
