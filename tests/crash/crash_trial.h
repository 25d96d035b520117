// What the tests of crash states share: how many are tried, the trying, and the count at the end.
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "tests/crash/crash_states.h"

namespace birkhoff {

// What the environment variable BIRKHOFF_CRASH_STATES says, or `usual` without it.
std::size_t num_crash_states(std::size_t usual);

// Counts over one or more traces of a test; prints "NAME: tried N, survived N, lost N" at its end.
class CrashTrial {
 public:
  // Starts the program again in a folder that holds a crash state, and returns what is wrong then,
  // empty if nothing. What it throws is wrong too.
  using Check =
      std::function<std::string(const std::filesystem::path& folder, const CrashState& state)>;

  CrashTrial(std::string name, Check check);
  ~CrashTrial();
  CrashTrial(const CrashTrial&) = delete;
  CrashTrial& operator=(const CrashTrial&) = delete;

  // Tries the states, each in a folder of its own in memory. A lost one is a failure of the test.
  void run(const IoTrace& trace, const std::vector<CrashState>& states);

 private:
  const std::string name_;
  const Check check_;
  std::size_t tried_ = 0, lost_ = 0;
};

}  // namespace birkhoff
