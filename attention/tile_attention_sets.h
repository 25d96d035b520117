// The kernels of each instruction set, by element type.
#pragma once

#include "attention/tile_attention.h"

namespace birkhoff {

const TileKernels<float>& tile_kernels_portable(float);
const TileKernels<double>& tile_kernels_portable(double);
const TileKernels<Bf16>& tile_kernels_portable(Bf16);
#if defined(__x86_64__)
const TileKernels<float>& tile_kernels_avx2(float);
const TileKernels<double>& tile_kernels_avx2(double);
const TileKernels<Bf16>& tile_kernels_avx2(Bf16);
const TileKernels<float>& tile_kernels_avx512(float);
const TileKernels<double>& tile_kernels_avx512(double);
const TileKernels<Bf16>& tile_kernels_avx512(Bf16);
const TileKernels<Bf16>& tile_kernels_avx512_bf16(Bf16);
#endif

}  // namespace birkhoff
