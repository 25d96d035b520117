// Sparse Sinkhorn attention (Tay et al. 2020). A SortNet scores pairs of blocks, and the scores are
// balanced. The balanced weights mix keys and values block by block ("sorting"), and every query
// attends to its sorted block and to its own block.
//
// Where the paper is silent or leaks the future, this code does the following.
// - Row = destination, column = source, in encoders and decoders.
// - Causal use: sources are complete earlier blocks. A block's weights depend on tokens up to its
//   first one, and its own tokens reach it only through the local part. Block 0, and every query
//   whose block has nothing to sort, sees only its own block (add_logits: plain local attention).
// - `none` and `cumulative` let a row give mass to a null source of score 0 and value 0, so a block
//   may decline: its sorted keys and values are then scaled down, not renormalized.
// - `paper_masked` balances the lower triangle with its diagonal, as published: column sums run
//   over later destinations and leak the future. Its sorted block, which contains the query's own
//   block, is masked token by token.
// - top_m keeps the largest weights of a finished row; among equal weights, the earlier blocks'.
//   All other weights become 0 and the row is not renormalized. AttentionOutput::sums reports them:
//   "block_weight_dropped" of "block_weight", summed over samples, heads and destinations.
// - Padding: keys, values and features of padding count as 0 in sorted blocks, and its own keys are
//   masked. Where only a share w < 1 of a sorted key's
//   weight is on tokens that exist, key and value are divided by w, and log w is added to the
//   logit.
// - Documents: a source is visible only if it lies wholly in one document, and only to queries of
//   that document whose block also starts in it.
#pragma once

#include <optional>

#include "attention/kernels/block_attention/block_attention.h"
#include "attention/kernels/sinkhorn/sinkhorn.h"
#include "attention/logit_terms.h"
#include "attention/mechanism.h"
#include "attention/mechanisms/sinkhorn/sort_net.h"
#include "configs/schema/attention.pb.h"

namespace birkhoff {

class SinkhornAttention : public Mechanism {
 public:
  // Adds the SortNet's parameters under prefix + ".sort_net"; causal `uniform` has none.
  SinkhornAttention(const configs::SinkhornAttention& config, const MechanismShape& shape,
                    const std::string& prefix, Parameters& parameters, const LogitTerms& terms);

  AttentionOutput attend(const AttentionInput& in, Path limit) const override;
  std::int64_t first_tokens() const override;
  MechanismTraits traits() const override;
  at::Tensor visible_keys(std::int64_t num_queries, std::int64_t num_keys) const override;
  std::vector<Choice> choices(const AttentionInput& in) const override;
  double forward_flops(std::int64_t num_tokens) const override;
  std::unique_ptr<DecodeState> decode_state(std::int64_t batch) const override;
  at::Tensor decode_step(DecodeState& state, const AttentionInput& in) const override;

 protected:
  // The block weights [B, H, N, N] before top_m. Destinations are pooled from x_q (first_BNC as in
  // AttentionInput), sources from x_kv. open_BNN is open_pairs(blocks). `dtype`: of the keys that
  // they mix.
  BalancedWeights block_weights(const Blocks& blocks, const at::Tensor& x_q_BLC,
                                const at::Tensor& first_BNC, const at::Tensor& x_kv_BLC,
                                const at::Tensor& open_BNN, const std::optional<NoiseKey>& noise,
                                at::ScalarType dtype, Path limit) const;
  // Whether the weights of the blocks that are mixed into one sum to 1.
  bool rows_sum_to_1() const;
  // Twice the multiply-adds of the block weights of N blocks.
  double weights_flops(std::int64_t num_blocks) const;

  configs::SinkhornAttention config_;
  MechanismShape shape_;
  LogitTerms terms_;

 private:
  bool leaky() const;
  // Whether the weights come from Sinkhorn iterations: false for the causal modes `none` and
  // `uniform`.
  bool balances() const;
  // bool [B, N, N]: the pairs of open_pairs() whose weight may be above 0.
  at::Tensor visible_pairs(const at::Tensor& open_BNN) const;
  // Rows first_row.. of the weights [B, H, N, N] before top_m, from the scores of all rows. B and H
  // of the scores may be 1. open_BNN is the result of open_pairs(), or undefined if all pairs are
  // visible. `dtype`: of the keys that they mix.
  BalancedWeights weights(const at::Tensor& scores_BHNN, const at::Tensor& open_BNN,
                          std::int64_t first_row, at::ScalarType dtype, Path limit) const;
  // int64 [B, H, U, top_m]: the sources with the largest weights of each row. Undefined: all.
  at::Tensor largest_sources(const at::Tensor& weights_BHUN) const;
  // The weights, with the weights of all other sources set to 0.
  static at::Tensor keep(const at::Tensor& weights_BHUN, const at::Tensor& sources_BHUm);

  std::optional<SortNet> sort_net_;  // none: all scores are 0
};

}  // namespace birkhoff
