// `train --restarts N`: the decision whether an ended job is started again.
#pragma once

#include <cstdint>
#include <string>

namespace birkhoff {

// A job is started again if the cause of its end may be temporary: a rank or machine was lost, it
// hung, a file could not be written, memory ran out, mpirun failed. Never after wrong input (the
// same error would recur), after a divergence, or after a request to stop.
class Restarts {
 public:
  // most: maximum restarts in a row without a new checkpoint; 0: none.
  explicit Restarts(int most) : most_(most) {}

  // A job ended with this exit code; `saved_step` is the step of the run's newest checkpoint, 0 if
  // there is none. Returns whether to start it again; `why` receives a line for the user, or
  // nothing if there is nothing to say.
  bool again(int code, std::int64_t saved_step, std::string& why);
  int in_a_row() const { return in_a_row_; }
  // Whether the cause of this exit code may be temporary.
  static bool may_pass(int code);

 private:
  const int most_;
  int in_a_row_ = 0;
  std::int64_t saved_step_ = -1;  // before the last restart
};

// Whether a job that ended with this exit code is neither finished nor saved.
bool is_failure(int code);

}  // namespace birkhoff
