#include "tests/attention/kernels/tile_attention/avx512_emulated.h"

#include "attention/kernels/block_mix/cpu_mix_body.h"
#include "attention/kernels/clusters/cpu_scores_body.h"
#include "attention/kernels/row_normalizer/cpu_rows_body.h"
#include "attention/kernels/sinkformer/cpu_sinkformer_body.h"
#include "attention/kernels/sinkhorn/cpu_prefix_body.h"
#include "attention/kernels/tile_attention/cpu_loop_body.h"

namespace birkhoff::test {

static_assert(kVectorBytes == 64 && kTakesPairs<Bf16>);

const TileKernels<float>& emulated_tile_kernels(float) { return kKernels<float>; }
const TileKernels<double>& emulated_tile_kernels(double) { return kKernels<double>; }
const TileKernels<Bf16>& emulated_tile_kernels(Bf16) { return kKernels<Bf16>; }
const MixKernels<float>& emulated_mix_kernels(float) { return kMixKernels<float>; }
const MixKernels<double>& emulated_mix_kernels(double) { return kMixKernels<double>; }
const MixKernels<Bf16>& emulated_mix_kernels(Bf16) { return kMixKernels<Bf16>; }
const ScoreKernels<float>& emulated_score_kernels(float) { return kScoreKernels<float>; }
const ScoreKernels<double>& emulated_score_kernels(double) { return kScoreKernels<double>; }
const ScoreKernels<Bf16>& emulated_score_kernels(Bf16) { return kScoreKernels<Bf16>; }
const RowKernels<float>& emulated_row_kernels(float) { return kRowKernels<float>; }
const RowKernels<double>& emulated_row_kernels(double) { return kRowKernels<double>; }
const RowKernels<Bf16>& emulated_row_kernels(Bf16) { return kRowKernels<Bf16>; }
const SinkformerKernels<float>& emulated_sinkformer_kernels(float) {
  return kSinkformerKernels<float>;
}
const SinkformerKernels<double>& emulated_sinkformer_kernels(double) {
  return kSinkformerKernels<double>;
}
const SinkformerKernels<Bf16>& emulated_sinkformer_kernels(Bf16) {
  return kSinkformerKernels<Bf16>;
}
const PrefixBalanceKernels& emulated_prefix_balance_kernels() { return kPrefixBalanceKernels; }

}  // namespace birkhoff::test
