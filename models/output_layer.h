// The output layer of a model that predicts tokens, and its loss: logits are the products of the
// stack's outputs with the rows of a table, which may be that of the embedding.
//
// With model.adaptive_softmax (Grave et al. 2017, "Efficient softmax approximation for GPUs",
// section 4) there is a table for each part of the ids (models/embeddings/vocabulary_parts.h), and
// the head has one logit more for each tail. For id v of the head, and id w of tail i,
//
//   p(v) = softmax(head)_v        p(w) = softmax(head)_(tail i) softmax(tail i)_w
//
// The outputs are projected to a part's width if it is not C. So the loss computes the logits of a
// tail for the tokens only whose target is in it.
//
// Legend: B batch, T tokens, N tokens of the batch, C channels, E columns of the table, V
// vocabulary, v this rank's part of it, K tails.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "cluster/base/interval.h"
#include "models/embeddings/token_embedding.h"
#include "models/losses/loss_sums.h"
#include "models/transformer/layers.h"
#include "models/transformer/stack.h"

namespace birkhoff::configs {
class Model;
}

namespace birkhoff {

class OutputLayer {
 public:
  // After the stack whose outputs it reads; its parameters are of the stack's last unit.
  // `embedding`: that of the same tokens, whose tables it has with model.tie_embeddings, and whose
  // projections with model.adaptive_softmax.tie_projections. `parameters` must outlive it.
  // Error(kConfig) as vocabulary_parts().
  OutputLayer(const configs::Model& config, std::int64_t vocabulary,
              const TokenEmbedding& embedding, const Stack& stack, Parameters& parameters);

  // The next two functions take outputs [B, T, C] of the stack in the compute dtype, or a slice if
  // `tokens` are divided. Collective then over the tensor axis, as is the backward pass.

  // The logits [B, T, V], in the parameters' dtype; with adaptive softmax, the log-probabilities.
  // No gradients if the model is divided.
  at::Tensor logits(const at::Tensor& x_BTC, const TokenSlices& tokens) const;

  struct Loss {
    LossSums sums;  // cross_entropy_sums()
    // bool [B, T]: the target is the id with the largest logit, of equal ones the smallest.
    at::Tensor correct_BT;  // undefined if it was not asked for
  };
  // Logits exist for some tokens at a time (models/losses/linear_cross_entropy.h); in training on
  // several ranks of the tensor axis they exist for all. Adaptive softmax has neither label
  // smoothing nor `correct_BT`.
  Loss loss(const at::Tensor& x_BTC, const TokenSlices& tokens, const at::Tensor& targets_BT,
            const at::Tensor& mask_BT, double label_smoothing = 0, bool with_correct = false) const;

  // StepDecoder::decode_step() of the stack with the embedding before it.
  at::Tensor decode_step(const TokenEmbedding& embedding, const Stack& stack, DecodeCache& cache,
                         const at::Tensor& tokens_B) const;

  // Forward FLOPs of one token in training, on all ranks of the tensor axis together. Those of
  // tails count for the share of tokens that zipf_share() expects there.
  double flops() const;

 private:
  struct Part {
    Interval ids;
    at::Tensor weight_VE;        // this rank's rows; with tied embeddings those of the embedding
    std::optional<Linear> down;  // from C to E, if these differ
    at::Tensor up_CE;            // instead: a projection of the embedding, used in reverse
  };
  bool is_adaptive() const { return parts_.size() > 1; }
  // The outputs projected to the width of a part.
  at::Tensor lowered(const Part& part, const at::Tensor& x) const;
  at::Tensor rounded(const at::Tensor& x) const { return x.to(parameters_.compute_dtype()); }
  at::Tensor head_weight() const;  // of its ids, then of the tails
  // The logits for this rank's ids, in the compute dtype.
  at::Tensor part_of_logits(const at::Tensor& x, const TokenSlices& tokens) const;
  at::Tensor log_probabilities(const at::Tensor& x_BTC) const;
  LossSums adaptive_loss(const at::Tensor& x_NC, const at::Tensor& targets_N,
                         const at::Tensor& mask_N) const;
  Loss divided_loss(const at::Tensor& x_BTC, const TokenSlices& tokens,
                    const at::Tensor& targets_BT, const at::Tensor& mask_BT, double label_smoothing,
                    bool with_correct) const;

  const Parameters& parameters_;
  std::int64_t vocabulary_;
  std::vector<Part> parts_;  // the head, then the tails
  at::Tensor tails_KE;       // the head's rows of the tails; undefined without adaptive softmax
  std::vector<int> units_;   // of the parameters that it reads
};

}  // namespace birkhoff
