// Mixture of Block Attention (Lu et al. 2025, "MoBA: Mixture of Block Attention for Long-Context
// LLMs", section 2.2): one softmax over the keys of a query's own block and of the blocks whose
// mean keys have the largest products with the query. A block whose last token is missing is never
// chosen, so the causal choice is exact, and decoding gives the same. The choice has no gradient.
//
// With grouped queries, choices belong to key heads: the mean of a group's queries chooses.
//
// Legend: B batch, H heads, L tokens, S tokens so far, N blocks, C chosen blocks, b tokens of a
// block, W listed tokens, D head dim.
#include <ATen/ATen.h>
#include <ATen/OpMathType.h>

#include <algorithm>

#include "attention/kernels/block_top_k/block_top_k.h"
#include "attention/kernels/common/grouped_queries.h"
#include "attention/key_value_cache.h"
#include "attention/logit_terms.h"
#include "attention/mechanism.h"
#include "attention/mechanisms/table.h"
#include "cluster/base/error.h"
#include "configs/schema/attention.pb.h"

namespace birkhoff {
namespace {

struct MobaState final : DecodeState {
  void select_rows(const at::Tensor& rows_B) override {
    cache.select_rows(rows_B);
    if (mean_BHND.defined()) mean_BHND = mean_BHND.index_select(0, rows_B);
  }

  KeyValueCache cache;
  at::Tensor mean_BHND;  // keys of complete blocks; undefined: none yet
};

class MixtureOfBlockAttention final : public Mechanism {
 public:
  MixtureOfBlockAttention(const configs::MixtureOfBlockAttention& config,
                          const MechanismShape& shape, const LogitTerms& terms)
      : shape_(shape),
        block_(config.block()),
        others_(config.top_blocks() - 1),
        dropout_(config.dropout()),
        terms_(terms) {}

  AttentionOutput attend(const AttentionInput& in, Path limit) const override {
    require(in.q_BHLD.size(2) == in.k_BHSD.size(2), "MoBA needs as many keys as queries");
    const BlockTopK choice{
        .q_BHLD = group_means(in.q_BHLD.detach(), in.k_BHSD.size(1)),
        .k_BHLD = in.k_BHSD,
        .documents = {in.segments_q_BL, in.key_lengths_B, in.q_BHLD, in.num_documents},
        .block = block_,
        .others = others_,
        .causal = shape_.causal};
    const GatheredAttention attention{
        .q_BHLD = in.q_BHLD,
        .k_BHSD = in.k_BHSD,
        .v_BHSD = in.v_BHSD,
        .rows = lists_of_blocks(choice, select_top_blocks(choice, limit)),
        .key_lengths_B = in.key_lengths_B,
        .relative = terms_.relative(in.q_BHLD),
        .sink_H = terms_.sink(in.q_BHLD),
        .dropout = dropout_,
        .noise = in.noise};
    return {attend_gathered(attention, limit).out_BHLD, {}};
  }

  MechanismTraits traits() const override {
    return {.causal = shape_.causal,
            .exact_in_decoding = shape_.causal,
            .convex = terms_.is_convex(),
            .selects = true,
            .discontinuous = true,
            .takes_relative_positions = true,
            .chooses_keys = true};
  }

  at::Tensor visible_keys(std::int64_t num_queries, std::int64_t num_keys) const override {
    const at::Tensor all_LS = at::ones({num_queries, num_keys}, at::kBool);
    return shape_.causal ? all_LS.tril() : all_LS;
  }

  double forward_flops(std::int64_t num_tokens) const override {
    const double n = static_cast<double>(num_tokens), b = static_cast<double>(block_),
                 blocks = n / b, c = static_cast<double>(others_);
    const double heads = static_cast<double>(shape_.heads),
                 D = static_cast<double>(shape_.head_dim);
    const double products = shape_.causal ? n * (blocks - 1) / 2 : n * blocks;
    // The first c blocks have fewer earlier ones.
    const double few = std::min(c, std::max(blocks - 1, 0.0));
    const double chosen =
        shape_.causal ? n * few - b * few * (few + 1) / 2 : n * few;  // pairs, in blocks
    const double own = shape_.causal ? n * (std::min(b, n) + 1) / 2 : n * std::min(b, n);
    return 2 * std::max(products, 0.0) * static_cast<double>(shape_.heads_of_keys()) * D +
           4 * (own + std::max(chosen, 0.0) * b) * heads * D + n * heads * terms_.forward_flops();
  }

  std::unique_ptr<DecodeState> decode_state(std::int64_t batch) const override {
    if (!shape_.causal) return Mechanism::decode_state(batch);
    return std::make_unique<MobaState>();
  }

  at::Tensor decode_step(DecodeState& state, const AttentionInput& in) const override {
    auto& of_sequences = static_cast<MobaState&>(state);
    KeyValueCache& cache = of_sequences.cache;
    at::Tensor& mean_BHND = of_sequences.mean_BHND;
    cache.append(in.k_BHSD, in.v_BHSD);
    const std::int64_t size = cache.size(), own = (size - 1) / block_;
    const at::Tensor k_BHSD = cache.keys(0, size), v_BHSD = cache.values(0, size);
    const at::TensorOptions numbers = in.q_BHLD.options().dtype(at::kLong);
    const at::Tensor own_W = at::arange(own * block_, size, numbers);
    at::Tensor token_BHW = own_W.expand({k_BHSD.size(0), k_BHSD.size(1), -1});
    if (const std::int64_t C = std::min(others_, own); C > 0) {
      const at::Tensor q_BH1D =
          group_means(in.q_BHLD.detach(), in.k_BHSD.size(1)).to(mean_BHND.scalar_type());
      const at::Tensor chosen_BHC =
          largest_first(at::matmul(q_BH1D, mean_BHND.transpose(2, 3)).squeeze(2), C);
      const at::Tensor tokens_BHCb = chosen_BHC.unsqueeze(3) * block_ + at::arange(block_, numbers);
      token_BHW = at::cat({tokens_BHCb.flatten(2), token_BHW}, 2);
    }
    if (size % block_ == 0) {
      const at::Tensor mean_BH1D =
          k_BHSD.narrow(2, size - block_, block_)
              .mean(2, /*keepdim=*/true, at::toOpMathType(k_BHSD.scalar_type()));
      mean_BHND = mean_BHND.defined() ? at::cat({mean_BHND, mean_BH1D}, 2) : mean_BH1D;
    }
    const at::Tensor token_BH1W = token_BHW.unsqueeze(2);
    return terms_.attend_listed(in.q_BHLD, k_BHSD, v_BHSD, token_BH1W,
                                at::ones_like(token_BH1W, at::kBool), size - 1,
                                SlotMerge::kOneSoftmax);
  }

 private:
  MechanismShape shape_;
  std::int64_t block_, others_;
  float dropout_;
  LogitTerms terms_;
};

}  // namespace

std::unique_ptr<Mechanism> make_moba(const MakeArguments& m) {
  return std::make_unique<MixtureOfBlockAttention>(m.config.moba(), m.shape, m.terms);
}

}  // namespace birkhoff
