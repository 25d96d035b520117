// Softmax attention within contiguous blocks of tokens, optionally including neighboring blocks
// ("Local Attention" of Tay et al. 2020).
//
// Legend: B batch, H heads, L queries, S keys, N blocks, b tokens of a block, W keys of a block, D
// head dim.
#include <ATen/ATen.h>

#include "attention/kernels/block_attention/block_attention.h"
#include "attention/key_value_cache.h"
#include "attention/logit_terms.h"
#include "attention/mechanism.h"
#include "attention/mechanisms/table.h"
#include "configs/schema/attention.pb.h"

namespace birkhoff {
namespace {

class BlockLocalAttention final : public Mechanism {
 public:
  BlockLocalAttention(const configs::BlockLocalAttention& config, const MechanismShape& shape,
                      const LogitTerms& terms)
      : shape_(shape),
        block_(config.block()),
        look_back_(config.look_back()),
        dropout_(config.dropout()),
        terms_(terms) {}

  AttentionOutput attend(const AttentionInput& in, Path limit) const override {
    const Blocks blocks = token_blocks(in, block_, shape_.causal);
    const KeyBlocks keys = neighbouring_keys(blocks, in.k_BHSD, in.v_BHSD, look_back_,
                                             shape_.causal ? 0 : look_back_, shape_.causal);
    const BlockAttention attention{.q_BHNbD = blocks.to_blocks(in.q_BHLD, 2),
                                   .keys = {keys},
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
    const at::Tensor query_L1 = at::arange(num_queries).unsqueeze(1);
    const at::Tensor key_S = at::arange(num_keys);
    const at::Tensor distance =
        at::div(query_L1, block_, "floor") - at::div(key_S, block_, "floor");
    if (!shape_.causal) return distance.abs() <= look_back_;
    return at::logical_and(distance <= look_back_, key_S <= query_L1);
  }

  double forward_flops(std::int64_t num_tokens) const override {
    const double n = static_cast<double>(num_tokens), b = static_cast<double>(block_);
    const double own = shape_.causal ? (b + 1) / 2 : b;
    const double neighbours = static_cast<double>(shape_.causal ? look_back_ : 2 * look_back_) * b;
    return 4 * n * (own + neighbours) * static_cast<double>(shape_.heads * shape_.head_dim) +
           n * static_cast<double>(shape_.heads) * terms_.forward_flops();
  }

  std::unique_ptr<DecodeState> decode_state(std::int64_t batch) const override {
    if (!shape_.causal) return Mechanism::decode_state(batch);
    return std::make_unique<KeyValueState>();
  }

  at::Tensor decode_step(DecodeState& state, const AttentionInput& in) const override {
    KeyValueCache& cache = static_cast<KeyValueState&>(state).cache;
    cache.append(in.k_BHSD, in.v_BHSD);
    const std::int64_t own_block = (cache.size() - 1) / block_;
    const std::int64_t first = std::max<std::int64_t>(0, own_block - look_back_) * block_;
    return terms_.attend(in.q_BHLD, cache.keys(first, cache.size()),
                         cache.values(first, cache.size()), cache.size() - first);
  }

 private:
  MechanismShape shape_;
  std::int64_t block_;
  std::int64_t look_back_;  // previous blocks visible, and following ones if not causal
  float dropout_;
  LogitTerms terms_;
};

}  // namespace

std::unique_ptr<Mechanism> make_block_local(const MakeArguments& m) {
  return std::make_unique<BlockLocalAttention>(m.config.block_local(), m.shape, m.terms);
}

}  // namespace birkhoff
