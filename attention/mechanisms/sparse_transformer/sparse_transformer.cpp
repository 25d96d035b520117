// The attention of the Sparse Transformer (Child et al. 2019), in the patterns of sparse_pattern.h.
//
// Legend: B batch, H heads, L tokens, S keys, W listed tokens.
#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <vector>

#include "attention/kernels/sparse_patterns/sparse_pattern.h"
#include "attention/key_value_cache.h"
#include "attention/mechanisms/table.h"
#include "cluster/base/error.h"
#include "configs/schema/attention.pb.h"

namespace birkhoff {
namespace {

using SparseConfig = configs::SparseTransformerAttention;

class SparseTransformerAttention final : public Mechanism {
 public:
  explicit SparseTransformerAttention(const MakeArguments& m)
      : shape_(m.shape), dropout_(m.config.sparse_transformer().dropout()), terms_(m.terms) {
    const SparseConfig& config = m.config.sparse_transformer();
    const std::int64_t l = config.stride(), c = config.summary();
    pattern_ = {.strided = config.pattern() == SparseConfig::strided,
                .merged = config.part() == SparseConfig::merged,
                .causal = m.shape.causal,
                .stride = l,
                .summary = std::min(c > 0 ? c : std::max<std::int64_t>(l / 16, 1), l)};
  }

  AttentionOutput attend(const AttentionInput& in, Path limit) const override {
    require(in.q_BHLD.size(2) == in.k_BHSD.size(2),
            "the Sparse Transformer needs as many keys as queries");
    const AttentionPart part = attend_in_pattern(
        lists(in.q_BHLD.size(2), in.q_BHLD.device()),
        {.q_BHLD = in.q_BHLD,
         .k_BHSD = in.k_BHSD,
         .v_BHSD = in.v_BHSD,
         .rows = {},
         .key_lengths_B = in.key_lengths_B,
         .relative = terms_.relative(in.q_BHLD),
         .dropout = dropout_,
         .noise = in.noise},
        Documents(in.segments_q_BL, /*lengths_B=*/{}, in.q_BHLD, in.num_documents), limit);
    const at::Tensor sink_H = terms_.sink(in.q_BHLD);
    return {sink_H.defined() ? with_sink(part, sink_H).out_BHLD : part.out_BHLD, {}};
  }

  MechanismTraits traits() const override {
    // The first queries of a decoder have no summary before them.
    const bool skips = !pattern_.merged && !pattern_.strided;
    return {.causal = shape_.causal,
            .exact_in_decoding = shape_.causal,
            .convex = !skips && terms_.is_convex(),
            .skips_queries = skips,
            .takes_relative_positions = true};
  }

  at::Tensor visible_keys(std::int64_t num_queries, std::int64_t num_keys) const override {
    return pattern_.sees(at::arange(num_queries).unsqueeze(1), at::arange(num_keys));
  }

  double forward_flops(std::int64_t num_tokens) const override {
    double pairs = 0;
    for (std::int64_t i = 0; i < num_tokens; ++i) {
      pairs += static_cast<double>(pattern_.num_visible(i, num_tokens));
    }
    return 4 * pairs * static_cast<double>(shape_.heads * shape_.head_dim) +
           static_cast<double>(num_tokens * shape_.heads) * terms_.forward_flops();
  }

  std::unique_ptr<DecodeState> decode_state(std::int64_t batch) const override {
    if (!shape_.causal) return Mechanism::decode_state(batch);
    return std::make_unique<KeyValueState>();
  }

  at::Tensor decode_step(DecodeState& state, const AttentionInput& in) const override {
    KeyValueCache& cache = static_cast<KeyValueState&>(state).cache;
    cache.append(in.k_BHSD, in.v_BHSD);
    const std::int64_t size = cache.size();
    const at::Tensor seen_S = pattern_.sees(at::full({1}, size - 1, at::kLong), at::arange(size));
    const at::Tensor token_W = at::nonzero(seen_S).squeeze(1).to(in.q_BHLD.device());
    if (token_W.numel() == 0) return at::zeros_like(in.q_BHLD);
    const at::Tensor token_BH1W = token_W.expand({in.k_BHSD.size(0), in.k_BHSD.size(1), 1, -1});
    return terms_.attend_listed(in.q_BHLD, cache.keys(0, size), cache.values(0, size), token_BH1W,
                                at::ones_like(token_BH1W, at::kBool), size - 1,
                                SlotMerge::kOneSoftmax);
  }

 private:
  // The lists of the pattern. They are kept, because making them costs time on the host, and
  // recorded steps of a GPU read them.
  std::vector<GatheredRows> lists(std::int64_t L, at::Device device) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<GatheredRows>& kept = lists_of_length_[L];
    if (kept.empty() || kept.front().queries.rows_BHP.device() != device) {
      kept = lists_of_pattern(pattern_, L, device);
    }
    return kept;
  }

  const MechanismShape shape_;
  SparsePattern pattern_;
  const float dropout_;
  const LogitTerms terms_;
  mutable std::mutex mutex_;  // of the lists
  mutable std::map<std::int64_t, std::vector<GatheredRows>> lists_of_length_;
};

}  // namespace

std::unique_ptr<Mechanism> make_sparse_transformer(const MakeArguments& m) {
  return std::make_unique<SparseTransformerAttention>(m);
}

}  // namespace birkhoff
