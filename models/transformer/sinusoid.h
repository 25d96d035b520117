// Sinusoidal position embeddings.
//
// Legend: T positions, C channels.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace birkhoff {

// Returns an fp64 table [T, C] (Vaswani et al. 2017, section 3.5) in T2T's layout: column i < C/2
// is sin(t / s_i) and column C/2 + i is cos(t / s_i), with wavelengths s_i geometric from 1 to
// 10,000. The last column of an odd C is 0.
at::Tensor sinusoid_table(std::int64_t positions, std::int64_t channels);

}  // namespace birkhoff
