// The memory of this process, for tests of how much an operation takes (Linux).
#pragma once

#include <cstdint>
#include <fstream>
#include <string>

namespace birkhoff {

// Its peak since the last call with `reset`, in bytes.
inline std::int64_t peak_memory(bool reset) {
  if (reset) std::ofstream("/proc/self/clear_refs") << "5";
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    std::int64_t kibibytes = 0;
    if (word == "VmHWM:" && status >> kibibytes) return kibibytes * 1024;
  }
  return 0;
}

}  // namespace birkhoff
