#include "tests/crash/crash_trial.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>

#include "tests/runtime/checkpoint/checkpoint_fixture.h"

namespace birkhoff {

std::size_t num_crash_states(std::size_t usual) {
  const char* set = std::getenv("BIRKHOFF_CRASH_STATES");
  return set != nullptr ? std::strtoull(set, nullptr, 10) : usual;
}

CrashTrial::CrashTrial(std::string name, Check check)
    : name_(std::move(name)), check_(std::move(check)) {}

CrashTrial::~CrashTrial() {
  std::cout << name_ << ": tried " << tried_ << ", survived " << tried_ - lost_ << ", lost "
            << lost_ << "\n";
}

void CrashTrial::run(const IoTrace& trace, const std::vector<CrashState>& states) {
  constexpr std::size_t kMaxMessages = 5;  // more messages add no information
  for (const CrashState& state : states) {
    const TestFolder folder;
    write_tree(state.tree, folder);
    std::string wrong;
    try {
      wrong = check_(folder, state);
    } catch (const std::exception& error) {
      wrong = error.what();
    }
    ++tried_;
    if (wrong.empty()) continue;
    if (++lost_ > kMaxMessages) continue;
    ADD_FAILURE() << name_ << ": " << wrong << "\ncut at call " << state.cut
                  << ", after: " << (state.cut == 0 ? "nothing" : describe(trace, state.cut - 1))
                  << "\npromised: " << state.mark
                  << "\nlost: " << (state.lost.empty() ? "nothing" : state.lost);
  }
}

}  // namespace birkhoff
