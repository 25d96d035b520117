// libFuzzer's entry: BIRKHOFF_FUZZ_TARGET is one of tests/fuzz/fuzz_targets.h.
#include <cstddef>
#include <cstdint>

#include "tests/fuzz/fuzz_targets.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  birkhoff::BIRKHOFF_FUZZ_TARGET({reinterpret_cast<const char*>(data), size});
  return 0;
}

// LibTorch takes half of the 512 MB that an input may use, and the sanitizer's freed memory, which
// it keeps from use for a while, would take the rest.
extern "C" const char* __asan_default_options() { return "quarantine_size_mb=32"; }
