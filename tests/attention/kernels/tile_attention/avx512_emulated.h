// The AVX-512 kernels in a form that any CPU can run: their own sources, with 64-byte vectors made
// of smaller ones.
#pragma once

#include <string>

#include "attention/kernels/block_mix/cpu_mix.h"
#include "attention/kernels/clusters/cpu_scores.h"
#include "attention/kernels/row_normalizer/cpu_rows.h"
#include "attention/kernels/sinkformer/cpu_sinkformer.h"
#include "attention/kernels/sinkhorn/cpu_prefix.h"
#include "attention/kernels/tile_attention/cpu_loop.h"

namespace birkhoff::test {

const TileKernels<float>& emulated_tile_kernels(float);
const TileKernels<double>& emulated_tile_kernels(double);
const TileKernels<Bf16>& emulated_tile_kernels(Bf16);  // of AVX-512 BF16
const TileKernels<Bf16>& emulated_amx_tile_kernels();
const MixKernels<float>& emulated_mix_kernels(float);
const MixKernels<double>& emulated_mix_kernels(double);
const MixKernels<Bf16>& emulated_mix_kernels(Bf16);
const ScoreKernels<float>& emulated_score_kernels(float);
const ScoreKernels<double>& emulated_score_kernels(double);
const ScoreKernels<Bf16>& emulated_score_kernels(Bf16);
const RowKernels<float>& emulated_row_kernels(float);
const RowKernels<double>& emulated_row_kernels(double);
const RowKernels<Bf16>& emulated_row_kernels(Bf16);
const SinkformerKernels<float>& emulated_sinkformer_kernels(float);
const SinkformerKernels<double>& emulated_sinkformer_kernels(double);
const SinkformerKernels<Bf16>& emulated_sinkformer_kernels(Bf16);
const PrefixBalanceKernels& emulated_prefix_balance_kernels();

// Calls f(kernels, name) for each set of this machine, whose kernels of(set) returns, and for the
// emulated ones.
template <typename Of, typename Kernels, typename F>
void for_each_set(const Of& of, const Kernels& emulated, const F& f) {
  for (const InstructionSet set :
       {InstructionSet::kPortable, InstructionSet::kAvx2, InstructionSet::kAvx512,
        InstructionSet::kAvx512Bf16, InstructionSet::kAmxBf16}) {
    if (is_supported(set)) f(of(set), "set " + std::string(name_of(set)));
  }
  f(emulated, "emulated AVX-512");
}

}  // namespace birkhoff::test
