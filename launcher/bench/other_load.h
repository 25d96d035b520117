// A report on CPU time that other processes used during a benchmark.
#pragma once

#include <string>

namespace birkhoff {

// Seconds, summed over all CPUs of one or more machines.
struct ProcessorSeconds {
  double all = 0;     // elapsed, including idle time
  double busy = 0;    // used by any process and by the system
  double stolen = 0;  // given to other virtual machines by the host
  double own = 0;     // used by this process and its children that have ended
};

// Counts between begin() and end(), which may be called again.
class OtherLoad {
 public:
  void begin();
  void end();
  const ProcessorSeconds& counted() const { return counted_; }
  // other_load_note() for this machine.
  std::string note() const;

 private:
  ProcessorSeconds start_, counted_;
};

// A line, after an empty line, about machines that were not quiet: how many of their `processors`
// other processes used. Empty if that is negligible.
std::string other_load_note(const ProcessorSeconds& counted, int processors);

}  // namespace birkhoff
