// Compiled once for each instruction set BIRKHOFF_SIMD.
#include "attention/kernels/tile_attention/cpu_loop_body.h"

namespace birkhoff {

constexpr InstructionSet kSet = InstructionSet::BIRKHOFF_SIMD;

template <InstructionSet, typename T>
const TileKernels<T>& compiled_tile_kernels() {
  return kKernels<T>;
}
#if !defined(__AVX512BF16__)
template const TileKernels<float>& compiled_tile_kernels<kSet, float>();
template const TileKernels<double>& compiled_tile_kernels<kSet, double>();
#endif
template const TileKernels<Bf16>& compiled_tile_kernels<kSet, Bf16>();

}  // namespace birkhoff
