// Time limit for one input, in CPU time of this thread, so that a busy machine fails no test.
#pragma once

#include <time.h>

#include "tests/sanitized.h"

namespace birkhoff {

inline constexpr double kMaxSeconds = kSanitized ? 10 : 1;

inline double processor_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

}  // namespace birkhoff
