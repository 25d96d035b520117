#include "attention/tile_attention.h"

#include <type_traits>

#include "attention/tile_attention_sets.h"

namespace birkhoff {

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
  return tile_kernels<T>(instruction_set());
}

template const TileKernels<float>& tile_kernels(InstructionSet);
template const TileKernels<double>& tile_kernels(InstructionSet);
template const TileKernels<Bf16>& tile_kernels(InstructionSet);
template const TileKernels<float>& tile_kernels();
template const TileKernels<double>& tile_kernels();
template const TileKernels<Bf16>& tile_kernels();

}  // namespace birkhoff
