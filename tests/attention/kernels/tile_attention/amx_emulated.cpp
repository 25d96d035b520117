// The tile kernels with AMX, emulated.
#include "attention/kernels/tile_attention/cpu_loop_body.h"
#include "tests/attention/kernels/tile_attention/avx512_emulated.h"

namespace birkhoff::test {

static_assert(kUsesAmx<Operand<Bf16>>);

const TileKernels<Bf16>& emulated_amx_tile_kernels() { return kKernels<Bf16>; }

}  // namespace birkhoff::test
