// Whether other processes took processor time while a benchmark measured.
#pragma once

#include <string>

namespace birkhoff {

// Seconds, added up over all processors of a machine, or of several.
struct ProcessorSeconds {
  double all = 0;     // that passed, idle ones too
  double busy = 0;    // of any process and of the system
  double stolen = 0;  // that a virtual machine's host gave to others
  double own = 0;     // of this process and of its children that have ended

  ProcessorSeconds& operator+=(const ProcessorSeconds& other);
};

// Since the machine's start; zeros where the system does not say.
ProcessorSeconds processor_seconds_so_far();

// Counts between begin() and end(), which may be called again.
class OtherLoad {
 public:
  void begin();
  void end();
  const ProcessorSeconds& counted() const { return counted_; }
  // Of this machine.
  std::string note() const;

 private:
  ProcessorSeconds start_, counted_;
};

// A line about machines that were not quiet, with an empty line before it: of how many of their
// `processors` others took the time. Empty if that is little.
std::string other_load_note(const ProcessorSeconds& counted, int processors);

}  // namespace birkhoff
