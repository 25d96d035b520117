// The memory of this process, for tests of how much an operation takes (Linux).
#pragma once

#include <cstdint>
#include <fstream>
#include <stdexcept>
#include <string>

namespace birkhoff {

// Its peak since the last call with `reset`, in bytes. std::runtime_error if the system does not
// tell.
inline std::int64_t peak_memory(bool reset) {
  if (reset && !(std::ofstream("/proc/self/clear_refs") << "5" << std::flush))
    throw std::runtime_error("/proc/self/clear_refs cannot be written");
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    std::int64_t kibibytes = 0;
    if (word == "VmHWM:" && status >> kibibytes) return kibibytes * 1024;
  }
  throw std::runtime_error("/proc/self/status has no VmHWM");
}

}  // namespace birkhoff
