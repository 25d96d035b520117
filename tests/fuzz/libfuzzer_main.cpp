// libFuzzer's entry point. BIRKHOFF_FUZZ_TARGET is one of the functions in
// tests/fuzz/fuzz_targets.h.
#include <cstddef>
#include <cstdint>

#include "tests/fuzz/fuzz_targets.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  birkhoff::BIRKHOFF_FUZZ_TARGET({reinterpret_cast<const char*>(data), size});
  return 0;
}

// LibTorch takes half of the 512 MB that an input may use. The sanitizer's quarantine of freed
// memory would take the rest.
extern "C" const char* __asan_default_options() { return "quarantine_size_mb=32"; }
