// Time limit for one input, in CPU time of this thread, so that a busy machine fails no test.
#pragma once

#include <time.h>

namespace birkhoff {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr double kMostSeconds = 10;
#else
inline constexpr double kMostSeconds = 1;
#endif

inline double processor_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

}  // namespace birkhoff
