#include "attention/kernels/tile_attention/cpu_loop.h"

#include <type_traits>

#include "attention/kernels/common/cpu_sets.h"

namespace birkhoff {

template <typename T>
const TileKernels<T>& tile_kernels(InstructionSet set) {
  return for_set(set, []<InstructionSet kSet>() -> const TileKernels<T>& {
    return compiled_tile_kernels<kSetOf<kSet, std::is_same_v<T, Bf16>>, T>();
  });
}

template const TileKernels<float>& tile_kernels(InstructionSet);
template const TileKernels<double>& tile_kernels(InstructionSet);
template const TileKernels<Bf16>& tile_kernels(InstructionSet);

}  // namespace birkhoff
