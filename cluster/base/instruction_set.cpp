#include "cluster/base/instruction_set.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <string_view>

#include "cluster/base/error.h"

namespace birkhoff {
namespace {

struct NamedSet {
  InstructionSet set;
  std::string_view name;
  const char *libtorch, *onednn, *mkl;  // their names for it
};
// From wide to narrow.
constexpr NamedSet kSets[] = {
    {InstructionSet::kAvx512Bf16, "avx512_bf16", "avx512", "AVX512_CORE_BF16", "AVX512"},
    {InstructionSet::kAvx512, "avx512", "avx512", "AVX512_CORE", "AVX512"},
    {InstructionSet::kAvx2, "avx2", "avx2", "AVX2", "AVX2"},
    {InstructionSet::kPortable, "portable", "default", "SSE41", "SSE4_2"}};

void limit_libraries(const NamedSet& set) {
  setenv("ATEN_CPU_CAPABILITY", set.libtorch, /*overwrite=*/0);
  setenv("ONEDNN_MAX_CPU_ISA", set.onednn, /*overwrite=*/0);
  setenv("MKL_ENABLE_INSTRUCTIONS", set.mkl, /*overwrite=*/0);
  // On CPUs of other vendors MKL obeys only this variable.
  if (set.set == InstructionSet::kPortable) setenv("MKL_CBWR", "COMPATIBLE", /*overwrite=*/0);
}

InstructionSet choose() {
  const char* asked = std::getenv("BIRKHOFF_CPU");
  if (asked != nullptr && *asked == '\0') asked = nullptr;
  for (const NamedSet& each : kSets) {
    if (asked != nullptr && each.name != asked) continue;
    if (is_supported(each.set)) {
      if (asked != nullptr) limit_libraries(each);
      return each.set;
    }
    if (asked != nullptr) {
      fail(ExitCode::kUsage,
           "BIRKHOFF_CPU={}: this CPU lacks the instructions; unset the variable, or set it "
           "to a narrower set (portable, avx2, avx512)",
           asked);
    }
  }
  fail(ExitCode::kUsage,
       "BIRKHOFF_CPU={}: unknown instruction set; unset the variable, or set it to portable, avx2, "
       "avx512 or avx512_bf16",
       asked);
}

}  // namespace

bool is_supported(InstructionSet set) {
  switch (set) {
    case InstructionSet::kPortable:
      return true;
#if defined(__x86_64__)
    case InstructionSet::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case InstructionSet::kAvx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw");
    case InstructionSet::kAvx512Bf16:
      return is_supported(InstructionSet::kAvx512) && __builtin_cpu_supports("avx512bf16");
#endif
    default:
      return false;
  }
}

InstructionSet instruction_set() {
  static const InstructionSet chosen = choose();
  return chosen;
}

std::string_view name_of(InstructionSet set) {
  return std::find_if(std::begin(kSets), std::end(kSets),
                      [set](const NamedSet& each) { return each.set == set; })
      ->name;
}

}  // namespace birkhoff
