#include "tests/attention/avx512_emulated.h"

#include "attention/block_mix_kernel.h"
#include "attention/prefix_balance_kernel.h"
#include "attention/tile_attention_kernel.h"

namespace birkhoff::testing {

static_assert(kVectorBytes == 64 && kTakesPairs<Bf16>);

const TileKernels<float>& emulated_tile_kernels(float) { return kKernels<float>; }
const TileKernels<double>& emulated_tile_kernels(double) { return kKernels<double>; }
const TileKernels<Bf16>& emulated_tile_kernels(Bf16) { return kKernels<Bf16>; }
const MixKernels<float>& emulated_mix_kernels(float) { return kMixKernels<float>; }
const MixKernels<double>& emulated_mix_kernels(double) { return kMixKernels<double>; }
const MixKernels<Bf16>& emulated_mix_kernels(Bf16) { return kMixKernels<Bf16>; }
const PrefixBalanceKernels& emulated_prefix_balance_kernels() { return kPrefixBalanceKernels; }

}  // namespace birkhoff::testing
