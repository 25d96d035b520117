// SortCut (Tay et al. 2020, section 3.3): Y = softmax(Q K_s^T / sqrt(D)) V_s, where K_s and V_s are
// the first n blocks that Sinkhorn attention sorts. All queries see the same n b keys, so they may
// be of another sequence. Only n rows of the weights are used to mix, but balancing them needs all
// N x N. With `local`, the softmax is also over the query's own block.
//
// With documents, which encoders do not have in training, a query sees only sorted blocks that
// begin in its document.
//
// Legend: B batch, H heads, L queries, S keys, N blocks of keys, n shared sorted blocks, b tokens
// of a block.
#include <ATen/ATen.h>

#include <algorithm>

#include "attention/kernels/sorted_blocks/sorted_blocks.h"
#include "attention/mechanisms/sinkhorn/sinkhorn.h"
#include "attention/mechanisms/table.h"
#include "cluster/base/error.h"

namespace birkhoff {
namespace {

using Sorting = configs::SinkhornAttention;

class SortCutAttention final : public SinkhornAttention {
 public:
  explicit SortCutAttention(const MakeArguments& m)
      : SinkhornAttention(m.config.sortcut().sinkhorn(), m.shape, m.prefix, m.parameters, m.terms),
        shared_(m.config.sortcut().blocks()),
        local_(m.config.sortcut().local()) {
    if (config_.combine() != Sorting::concat) {
      fail(ExitCode::kConfig, "sortcut.sinkhorn.combine: sortcut has one softmax; remove it");
    }
    if (config_.top_m() > 0) {
      fail(ExitCode::kConfig, "sortcut.sinkhorn.top_m: sortcut mixes all blocks; remove it");
    }
  }

  AttentionOutput attend(const AttentionInput& in, Path limit) const override {
    require(!local_ || in.q_BHLD.size(2) == in.k_BHSD.size(2),
            "sortcut with `local` needs as many keys as queries");
    const Blocks blocks(in.k_BHSD,
                        {.key_lengths_B = in.key_lengths_B, .segments_BL = in.segments_kv_BS},
                        config_.block(), /*causal=*/false);
    const at::Tensor open_BNN = open_pairs(blocks);
    const at::Tensor weights_BHNN =
        block_weights(blocks, in.x_kv_BSC, in.first_x_BNC, in.x_kv_BSC, open_BNN, in.noise,
                      in.k_BHSD.scalar_type(), limit)
            .p;
    BlockAttention attention = shared_blocks_attention(
        blocks,
        {.weights_BHnN = weights_BHNN.narrow(2, 0, std::min(shared_, blocks.num_blocks())),
         .visible_BNN = open_BNN,
         .segments_q_BL = in.segments_q_BL,
         .own = local_},
        in.q_BHLD, in.k_BHSD, in.v_BHSD, limit);
    attention.dropout = config_.dropout();
    attention.noise = in.noise;
    attention.relative = terms_.relative(in.q_BHLD);
    attention.sink_H = terms_.sink(in.q_BHLD);
    return {attend_in_blocks(attention, limit).flatten(2, 3).narrow(2, 0, in.q_BHLD.size(2)), {}};
  }

  MechanismTraits traits() const override {
    return {.ties_key_value = config_.tie_key_value(),
            .supports_cross_attention = !local_,
            .convex = rows_sum_to_1() && terms_.is_convex(),
            .unbounded = config_.iterations() == 0,
            .takes_relative_positions = local_};
  }

  at::Tensor visible_keys(std::int64_t num_queries, std::int64_t num_keys) const override {
    return at::ones({num_queries, num_keys}, at::kBool);
  }

  double forward_flops(std::int64_t num_tokens) const override {
    const std::int64_t b = config_.block(), N = (num_tokens + b - 1) / b, n = std::min(shared_, N);
    const double L = static_cast<double>(num_tokens),
                 width = static_cast<double>(shape_.heads * shape_.head_dim),
                 key_width = static_cast<double>(shape_.heads_of_keys() * shape_.head_dim);
    const double pairs = L * static_cast<double>((n + (local_ ? 1 : 0)) * b),
                 mixes = config_.tie_key_value() ? 1 : 2;
    return 4 * pairs * width + 2 * mixes * static_cast<double>(n * N * b) * key_width +
           weights_flops(N) + L * static_cast<double>(shape_.heads) * terms_.forward_flops();
  }

 private:
  const std::int64_t shared_;  // n, if the sequence has as many blocks
  const bool local_;
};

}  // namespace

std::unique_ptr<Mechanism> make_sortcut(const MakeArguments& m) {
  return std::make_unique<SortCutAttention>(m);
}

}  // namespace birkhoff
