// Attention over every key or, when causal, over the token's own key and every past one. With
// softmax, on the CPU it uses the block-attention kernels, with a sequence as one block; on a GPU
// it uses LibTorch's. Softmax with sinusoidal distances is attention over gathered rows.
#pragma once

#include <optional>

#include "attention/kernels/block_attention/block_attention.h"
#include "attention/kernels/gathered_attention/gathered_attention.h"
#include "attention/kernels/row_normalizer/row_attention.h"
#include "attention/logit_terms.h"
#include "attention/mechanism.h"
#include "attention/sinusoidal_distances.h"

namespace birkhoff::configs {
class DenseAttention;
}

namespace birkhoff {

// Dense attention as attention over gathered rows: one segment of all rows, so that padding and
// documents need no mask of pairs. For GPUs, and for distances. Causal queries are the last of the
// tokens. Queries and keys have the same documents, whose positions must fit
// (fit_document_positions). The lists are on `device`; on the meta device, for choose_path(),
// without documents.
GatheredAttention as_one_segment(const AttentionInput& in, bool causal, const at::Tensor& sink_H,
                                 at::Device device);

class DenseAttention : public Mechanism {
 public:
  // A learned exponent is added to `parameters` as "<prefix>.exponent".
  DenseAttention(const configs::DenseAttention& config, const MechanismShape& shape,
                 const std::string& prefix, Parameters& parameters, const LogitTerms& terms);

  AttentionOutput attend(const AttentionInput& in, Path limit) const override;
  MechanismTraits traits() const override;
  at::Tensor visible_keys(std::int64_t num_queries, std::int64_t num_keys) const override;
  double forward_flops(std::int64_t num_tokens) const override;
  std::unique_ptr<DecodeState> decode_state(std::int64_t batch) const override;
  at::Tensor decode_step(DecodeState& state, const AttentionInput& in) const override;

 private:
  // Of a pass of training or not.
  RowNormalizer normalizer(bool trains) const;
  // `rows`: rows_of(in).
  PathChoice choose(const AttentionInput& in, const RowAttention& rows, Path limit) const;
  // Without ranges of keys and sinusoidal distances.
  RowAttention rows_of(const AttentionInput& in) const;
  // Adds sinusoidal distances, if there are any. Returns int32 [1, L], the first key that each
  // query sees; undefined: key 0.
  at::Tensor add_distances(RowAttention& rows) const;
  // For our CPU kernels, the sequence as one block, without masks.
  BlockAttention as_one_block(const AttentionInput& in) const;
  // Why as_one_segment() does not take the documents; empty if it does.
  static std::string why_not_documents(const AttentionInput& in);
  // Why kernels do not take softmax with sinusoidal distances; empty if they do.
  std::string why_not_distances(const AttentionInput& in) const;
  // The choice of attention over gathered rows for as_one_segment().
  PathChoice choose_one_segment(const AttentionInput& in) const;
  // The output [B, H, L, D] in plain operations, by LibTorch's fused operations without dropout,
  // and by our kernels.
  at::Tensor reference(const AttentionInput& in, RowAttention rows) const;
  at::Tensor by_library(const AttentionInput& in) const;
  at::Tensor fused(const AttentionInput& in) const;  // of softmax
  at::Tensor fused_sparse(const AttentionInput& in, RowAttention rows) const;
  // bool [B or 1, 1, L, S], regardless of causality. Undefined where every key is visible.
  at::Tensor key_mask(const AttentionInput& in) const;

  MechanismShape shape_;
  float dropout_;
  LogitTerms terms_;
  RowNormalizer normalizer_;
  bool only_in_training_;
  std::optional<SinusoidalDistances> distances_;
  at::Tensor exponent_H_;  // of entmax: 1 + sigmoid of it
};

}  // namespace birkhoff
