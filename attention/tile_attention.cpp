#include "attention/tile_attention.h"

#include <initializer_list>
#include <type_traits>

#include "attention/tile_attention_sets.h"

namespace birkhoff {

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

InstructionSet widest_set() {
  for (const InstructionSet set :
       {InstructionSet::kAvx512Bf16, InstructionSet::kAvx512, InstructionSet::kAvx2}) {
    if (is_supported(set)) return set;
  }
  return InstructionSet::kPortable;
}

template <typename T>
const TileKernels<T>& tile_kernels(InstructionSet set) {
#if defined(__x86_64__)
  if constexpr (std::is_same_v<T, Bf16>) {
    if (set == InstructionSet::kAvx512Bf16) return tile_kernels_avx512_bf16(T{});
  }
  if (set >= InstructionSet::kAvx512) return tile_kernels_avx512(T{});
  if (set == InstructionSet::kAvx2) return tile_kernels_avx2(T{});
#endif
  (void)set;
  return tile_kernels_portable(T{});
}

template <typename T>
const TileKernels<T>& tile_kernels() {
  return tile_kernels<T>(widest_set());
}

template const TileKernels<float>& tile_kernels(InstructionSet);
template const TileKernels<double>& tile_kernels(InstructionSet);
template const TileKernels<Bf16>& tile_kernels(InstructionSet);
template const TileKernels<float>& tile_kernels();
template const TileKernels<double>& tile_kernels();
template const TileKernels<Bf16>& tile_kernels();

}  // namespace birkhoff
