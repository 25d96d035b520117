// Softmax attention to the nearest tokens: a query sees the `width` last tokens, its own included;
// in an encoder also the width - 1 tokens after it (Beltagy et al. 2020, "Longformer", section 3.1;
// Child et al. 2019, "Generating Long Sequences with Sparse Transformers", section 4.2).
//
// Legend: B batch, H heads, L queries, S keys, N blocks, b tokens of a block, D head dim.
#include <ATen/ATen.h>

#include <algorithm>

#include "attention/kernels/block_attention/block_attention.h"
#include "attention/key_value_cache.h"
#include "attention/logit_terms.h"
#include "attention/mechanism.h"
#include "attention/mechanisms/table.h"
#include "configs/schema/attention.pb.h"

namespace birkhoff {
namespace {

// The kernels find the keys by blocks. The length of a block changes nothing but rounding and the
// numbering of dropout's noise. It is a kernel's tile, 64 tokens, as long as a window has few
// blocks, because GPU kernels accept a limited number.
std::int64_t block_length(std::int64_t width, std::int64_t num_tokens) {
  constexpr std::int64_t kTile = 64, kMaxBlocks = 7;
  const std::int64_t tiles =
      (std::min(width, num_tokens) + kMaxBlocks * kTile - 1) / (kMaxBlocks * kTile);
  return std::clamp<std::int64_t>(num_tokens, 1, tiles * kTile);
}

class SlidingWindowAttention final : public Mechanism {
 public:
  SlidingWindowAttention(const configs::SlidingWindowAttention& config, const MechanismShape& shape,
                         const LogitTerms& terms)
      : shape_(shape), width_(config.width()), dropout_(config.dropout()), terms_(terms) {}

  AttentionOutput attend(const AttentionInput& in, Path limit) const override {
    const Blocks blocks = token_blocks(in, block_length(width_, in.q_BHLD.size(2)), shape_.causal);
    const BlockAttention attention{
        .q_BHNbD = blocks.to_blocks(in.q_BHLD, 2),
        .keys = {nearest_keys(blocks, in.k_BHSD, in.v_BHSD, width_, shape_.causal)},
        .dropout = dropout_,
        .noise = in.noise,
        .relative = terms_.relative(in.q_BHLD),
        .sink_H = terms_.sink(in.q_BHLD)};
    return {blocks.from_blocks(attend_in_blocks(attention, limit), 2), {}};
  }

  MechanismTraits traits() const override {
    return {.causal = shape_.causal,
            .exact_in_decoding = shape_.causal,
            .convex = terms_.is_convex(),
            .takes_relative_positions = true};
  }

  at::Tensor visible_keys(std::int64_t num_queries, std::int64_t num_keys) const override {
    const at::Tensor distance_LS = at::arange(num_queries).unsqueeze(1) - at::arange(num_keys);
    const at::Tensor near_LS = distance_LS.abs() < width_;
    return shape_.causal ? at::logical_and(near_LS, distance_LS >= 0) : near_LS;
  }

  double forward_flops(std::int64_t num_tokens) const override {
    // Query i sees min(i + 1, width) keys, and the same number after it if not causal.
    const double n = static_cast<double>(num_tokens);
    const double w = static_cast<double>(std::min(width_, num_tokens));
    const double past = n * w - w * (w - 1) / 2;
    const double pairs = shape_.causal ? past : 2 * past - n;
    return 4 * pairs * static_cast<double>(shape_.heads * shape_.head_dim) +
           n * static_cast<double>(shape_.heads) * terms_.forward_flops();
  }

  std::unique_ptr<DecodeState> decode_state(std::int64_t batch) const override {
    if (!shape_.causal) return Mechanism::decode_state(batch);
    return std::make_unique<KeyValueState>();
  }

  at::Tensor decode_step(DecodeState& state, const AttentionInput& in) const override {
    KeyValueCache& cache = static_cast<KeyValueState&>(state).cache;
    cache.append(in.k_BHSD, in.v_BHSD);
    const std::int64_t first = std::max<std::int64_t>(0, cache.size() - width_);
    return terms_.attend(in.q_BHLD, cache.keys(first, cache.size()),
                         cache.values(first, cache.size()), cache.size() - first);
  }

 private:
  MechanismShape shape_;
  std::int64_t width_;
  float dropout_;
  LogitTerms terms_;
};

}  // namespace

std::unique_ptr<Mechanism> make_sliding_window(const MakeArguments& m) {
  return std::make_unique<SlidingWindowAttention>(m.config.sliding_window(), m.shape, m.terms);
}

}  // namespace birkhoff
