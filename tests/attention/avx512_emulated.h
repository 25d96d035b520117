// The AVX-512 kernels in a form that any CPU can run: their own sources, with 64-byte vectors made
// of smaller ones.
#pragma once

#include "attention/kernels/block_mix/cpu_mix.h"
#include "attention/kernels/sinkhorn/cpu_prefix.h"
#include "attention/kernels/tile_attention/cpu_loop.h"

namespace birkhoff::test {

const TileKernels<float>& emulated_tile_kernels(float);
const TileKernels<double>& emulated_tile_kernels(double);
const TileKernels<Bf16>& emulated_tile_kernels(Bf16);  // of AVX-512 BF16
const MixKernels<float>& emulated_mix_kernels(float);
const MixKernels<double>& emulated_mix_kernels(double);
const MixKernels<Bf16>& emulated_mix_kernels(Bf16);
const PrefixBalanceKernels& emulated_prefix_balance_kernels();

}  // namespace birkhoff::test
