// Counts the attempts of a harness and those that survive, and prints one line with the result.
#pragma once

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>

namespace birkhoff {

class Tally {
 public:
  explicit Tally(std::string what) : what_(std::move(what)) {}
  ~Tally() {
    fmt::print("{}: tried {}, survived {}, lost {}\n", what_, tried_, tried_ - lost_, lost_);
  }
  Tally(const Tally&) = delete;
  Tally& operator=(const Tally&) = delete;

  // Runs one attempt. It is lost if an expectation in it fails or it throws.
  void attempt(const std::function<void()>& body) {
    const int before = num_failures();
    try {
      body();
    } catch (const std::exception& error) {
      ADD_FAILURE() << "unexpected: " << error.what();
    }
    ++tried_;
    lost_ += num_failures() > before;
  }
  std::int64_t tried() const { return tried_; }

 private:
  static int num_failures() {
    return testing::UnitTest::GetInstance()->current_test_info()->result()->total_part_count();
  }

  const std::string what_;
  std::int64_t tried_ = 0, lost_ = 0;
};

}  // namespace birkhoff
