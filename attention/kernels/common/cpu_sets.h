// The choice among kernels that are compiled once for each instruction set (birkhoff_simd in
// cmake/BirkhoffTargets.cmake).
#pragma once

#include "cluster/base/instruction_set.h"

namespace birkhoff {

// Returns select.operator()<kSet>() for `set` if this program has code for it, else for kPortable.
template <typename Select>
decltype(auto) for_set([[maybe_unused]] InstructionSet set, Select select) {
#if defined(__x86_64__)
  switch (set) {
    case InstructionSet::kAmxBf16:
      return select.template operator()<InstructionSet::kAmxBf16>();
    case InstructionSet::kAvx512Bf16:
      return select.template operator()<InstructionSet::kAvx512Bf16>();
    case InstructionSet::kAvx512:
      return select.template operator()<InstructionSet::kAvx512>();
    case InstructionSet::kAvx2:
      return select.template operator()<InstructionSet::kAvx2>();
    case InstructionSet::kPortable:
      break;
  }
#endif
  return select.template operator()<InstructionSet::kPortable>();
}

// The set whose code kernels of a type run: products of bf16 are useful only for bf16.
template <InstructionSet kSet, bool kIsBf16>
constexpr InstructionSet kSetOf =
    kSet > InstructionSet::kAvx512 && !kIsBf16 ? InstructionSet::kAvx512 : kSet;

}  // namespace birkhoff
