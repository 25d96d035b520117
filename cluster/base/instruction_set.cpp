#include "cluster/base/instruction_set.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <string_view>

#include "cluster/base/error.h"
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace birkhoff {
namespace {

struct NamedSet {
  InstructionSet set;
  std::string_view name;
  const char *libtorch, *onednn, *mkl;  // their names for it
};
// From wide to narrow.
constexpr NamedSet kSets[] = {
    {InstructionSet::kAmxBf16, "amx_bf16", "avx512", "AVX512_CORE_AMX", "AVX512_E4"},
    {InstructionSet::kAvx512Bf16, "avx512_bf16", "avx512", "AVX512_CORE_BF16", "AVX512"},
    {InstructionSet::kAvx512, "avx512", "avx512", "AVX512_CORE", "AVX512"},
    {InstructionSet::kAvx2, "avx2", "avx2", "AVX2", "AVX2"},
    {InstructionSet::kPortable, "portable", "default", "SSE41", "SSE4_2"}};

void limit_libraries(const NamedSet& set) {
  setenv("ATEN_CPU_CAPABILITY", set.libtorch, /*overwrite=*/0);
  setenv("ONEDNN_MAX_CPU_ISA", set.onednn, /*overwrite=*/0);
  setenv("MKL_ENABLE_INSTRUCTIONS", set.mkl, /*overwrite=*/0);
  // On CPUs that are not Intel's, MKL obeys only this variable.
  if (set.set == InstructionSet::kPortable) setenv("MKL_CBWR", "COMPATIBLE", /*overwrite=*/0);
}

#if defined(__x86_64__)
// The features "amx-tile" and "amx-bf16", which __builtin_cpu_supports() of clang 14 does not know:
// bits 24 and 22 of EDX of CPUID's leaf 7 (Intel's manual, volume 2, CPUID).
bool has_amx() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kBits = 1u << 24 | 1u << 22;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & kBits) == kBits;
}
#endif

// Linux gives a process AMX's registers, which enlarge its threads, only on request.
bool may_use_amx() {
#if defined(__linux__) && defined(__x86_64__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XTILEDATA
  static const bool may = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return may;
#else
  return false;
#endif
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
           "to a narrower set (portable, avx2, avx512, avx512_bf16)",
           asked);
    }
  }
  fail(ExitCode::kUsage,
       "BIRKHOFF_CPU={}: unknown instruction set; unset the variable, or set it to portable, avx2, "
       "avx512, avx512_bf16 or amx_bf16",
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
    case InstructionSet::kAmxBf16:
      return is_supported(InstructionSet::kAvx512Bf16) && has_amx() && may_use_amx();
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
