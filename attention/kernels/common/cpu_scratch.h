// A kernel's scratch memory: aligned to 64 bytes, uninitialized.
#pragma once

#include <cstddef>
#include <memory>
#include <new>

namespace birkhoff {

struct FreeScratch {
  void operator()(std::byte* memory) const { ::operator delete[](memory, std::align_val_t{64}); }
};
using ScratchMemory = std::unique_ptr<std::byte[], FreeScratch>;

inline ScratchMemory scratch_memory(std::size_t bytes) {
  return ScratchMemory(new (std::align_val_t{64}) std::byte[bytes]);
}

}  // namespace birkhoff
