// Shared by the tests of crash states: how many states to try, trying them, and the final count.
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "tests/crash/crash_states.h"

namespace birkhoff {

// The value of the environment variable BIRKHOFF_CRASH_STATES, or `usual` if it is not set.
std::size_t num_crash_states(std::size_t usual);

// Counts over one or more traces of a test; prints "NAME: tried N, survived N, lost N" at its end.
class CrashTrial {
 public:
  // Starts the program again in a folder that holds a crash state, and returns what is wrong then;
  // empty if nothing is. An exception counts as wrong, too.
  using Check =
      std::function<std::string(const std::filesystem::path& folder, const CrashState& state)>;

  CrashTrial(std::string name, Check check);
  ~CrashTrial();
  CrashTrial(const CrashTrial&) = delete;
  CrashTrial& operator=(const CrashTrial&) = delete;

  // Tries the states, each in its own folder in memory. A lost state is a test failure.
  void run(const IoTrace& trace, const std::vector<CrashState>& states);

 private:
  const std::string name_;
  const Check check_;
  std::size_t tried_ = 0, lost_ = 0;
};

}  // namespace birkhoff
