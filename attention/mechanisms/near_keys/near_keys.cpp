// Softmax attention to near keys. Block-local: those of the query's own block of tokens, and of
// neighboring blocks ("Local Attention" of Tay et al. 2020). Sliding windows: the `width` last
// tokens, the query's own included; in an encoder also the width - 1 tokens after it (Beltagy et
// al. 2020, "Longformer", section 3.1; Child et al. 2019, "Generating Long Sequences with Sparse
// Transformers", section 4.2).
//
// Legend: B batch, H heads, L queries, S keys, N blocks, b tokens of a block, D head dim.
#include <ATen/ATen.h>

#include <algorithm>

#include "attention/kernels/block_attention/block_attention.h"
#include "attention/key_value_cache.h"
#include "attention/mechanisms/table.h"
#include "configs/schema/attention.pb.h"

namespace birkhoff {
namespace {

// What both have in common.
class NearKeysAttention : public Mechanism {
 public:
  NearKeysAttention(const MechanismShape& shape, float dropout, const LogitTerms& terms)
      : shape_(shape), dropout_(dropout), terms_(terms) {}

  AttentionOutput attend(const AttentionInput& in, Path limit) const override {
    const Blocks blocks = token_blocks(in, block_length(in.q_BHLD.size(2)), shape_.causal);
    const BlockAttention attention{.q_BHNbD = blocks.to_blocks(in.q_BHLD, 2),
                                   .keys = {keys(blocks, in)},
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

  double forward_flops(std::int64_t num_tokens) const override {
    return 4 * num_pairs(num_tokens) * static_cast<double>(shape_.heads * shape_.head_dim) +
           static_cast<double>(num_tokens * shape_.heads) * terms_.forward_flops();
  }

  std::unique_ptr<DecodeState> decode_state(std::int64_t batch) const override {
    if (!shape_.causal) return Mechanism::decode_state(batch);
    return std::make_unique<KeyValueState>();
  }

  at::Tensor decode_step(DecodeState& state, const AttentionInput& in) const override {
    KeyValueCache& cache = static_cast<KeyValueState&>(state).cache;
    cache.append(in.k_BHSD, in.v_BHSD);
    const std::int64_t first = std::max<std::int64_t>(0, first_key(cache.size() - 1));
    return terms_.attend(in.q_BHLD, cache.keys(first, cache.size()),
                         cache.values(first, cache.size()), cache.size() - first);
  }

 protected:
  bool causal() const { return shape_.causal; }

 private:
  // Of the blocks in which the kernels find the keys of a sequence.
  virtual std::int64_t block_length(std::int64_t num_tokens) const = 0;
  virtual KeyBlocks keys(const Blocks& blocks, const AttentionInput& in) const = 0;
  // Pairs of a query and a key that it sees, of one sequence.
  virtual double num_pairs(std::int64_t num_tokens) const = 0;
  // The first key that a causal query sees; may be negative.
  virtual std::int64_t first_key(std::int64_t query) const = 0;

  const MechanismShape shape_;
  const float dropout_;
  const LogitTerms terms_;
};

class BlockLocalAttention final : public NearKeysAttention {
 public:
  explicit BlockLocalAttention(const MakeArguments& m)
      : NearKeysAttention(m.shape, m.config.block_local().dropout(), m.terms),
        block_(m.config.block_local().block()),
        look_back_(m.config.block_local().look_back()) {}

  at::Tensor visible_keys(std::int64_t num_queries, std::int64_t num_keys) const override {
    const at::Tensor query_L1 = at::arange(num_queries).unsqueeze(1);
    const at::Tensor key_S = at::arange(num_keys);
    const at::Tensor distance =
        at::div(query_L1, block_, "floor") - at::div(key_S, block_, "floor");
    if (!causal()) return distance.abs() <= look_back_;
    return at::logical_and(distance <= look_back_, key_S <= query_L1);
  }

 private:
  std::int64_t block_length(std::int64_t) const override { return block_; }
  KeyBlocks keys(const Blocks& blocks, const AttentionInput& in) const override {
    return neighbouring_keys(blocks, in.k_BHSD, in.v_BHSD, look_back_, causal() ? 0 : look_back_,
                             causal());
  }
  double num_pairs(std::int64_t num_tokens) const override {
    const double n = static_cast<double>(num_tokens), b = static_cast<double>(block_);
    const double own = causal() ? (b + 1) / 2 : b;
    return n * (own + static_cast<double>(causal() ? look_back_ : 2 * look_back_) * b);
  }
  std::int64_t first_key(std::int64_t query) const override {
    return (query / block_ - look_back_) * block_;
  }

  const std::int64_t block_;
  const std::int64_t look_back_;  // previous blocks visible, and following ones if not causal
};

class SlidingWindowAttention final : public NearKeysAttention {
 public:
  explicit SlidingWindowAttention(const MakeArguments& m)
      : NearKeysAttention(m.shape, m.config.sliding_window().dropout(), m.terms),
        width_(m.config.sliding_window().width()) {}

  at::Tensor visible_keys(std::int64_t num_queries, std::int64_t num_keys) const override {
    const at::Tensor distance_LS = at::arange(num_queries).unsqueeze(1) - at::arange(num_keys);
    const at::Tensor near_LS = distance_LS.abs() < width_;
    return causal() ? at::logical_and(near_LS, distance_LS >= 0) : near_LS;
  }

 private:
  // Changes nothing but rounding and the numbering of dropout's noise. It is a kernel's tile, 64
  // tokens, as long as a window has few blocks, because GPU kernels accept a limited number.
  std::int64_t block_length(std::int64_t num_tokens) const override {
    constexpr std::int64_t kTile = 64, kMaxBlocks = 7;
    const std::int64_t tiles =
        (std::min(width_, num_tokens) + kMaxBlocks * kTile - 1) / (kMaxBlocks * kTile);
    return std::clamp<std::int64_t>(num_tokens, 1, tiles * kTile);
  }
  KeyBlocks keys(const Blocks& blocks, const AttentionInput& in) const override {
    return nearest_keys(blocks, in.k_BHSD, in.v_BHSD, width_, causal());
  }
  double num_pairs(std::int64_t num_tokens) const override {
    // Query i sees min(i + 1, width) keys, and the same number after it if not causal.
    const double n = static_cast<double>(num_tokens);
    const double w = static_cast<double>(std::min(width_, num_tokens));
    const double past = n * w - w * (w - 1) / 2;
    return causal() ? past : 2 * past - n;
  }
  std::int64_t first_key(std::int64_t query) const override { return query + 1 - width_; }

  const std::int64_t width_;
};

}  // namespace

std::unique_ptr<Mechanism> make_block_local(const MakeArguments& m) {
  return std::make_unique<BlockLocalAttention>(m);
}

std::unique_ptr<Mechanism> make_sliding_window(const MakeArguments& m) {
  return std::make_unique<SlidingWindowAttention>(m);
}

}  // namespace birkhoff
