// The output layer of a model that predicts tokens, and its loss: logits are the products of the
// stack's outputs with the rows of a table, which may be that of the embedding.
//
// Legend: B batch, T tokens, C channels, E columns of the table, V vocabulary, v this rank's part
// of it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

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
  // `embedding`: that of the same tokens, whose table it has with model.tie_embeddings.
  // `parameters` must outlive it.
  OutputLayer(const configs::Model& config, std::int64_t vocabulary,
              const TokenEmbedding& embedding, const Stack& stack, Parameters& parameters);

  // The next two functions take outputs [B, T, C] of the stack in the compute dtype, or a slice if
  // `tokens` are divided. Collective then over the tensor axis, as is the backward pass.

  // The logits [B, T, V], in the parameters' dtype. No gradients if the model is divided.
  at::Tensor logits(const at::Tensor& x_BTC, const TokenSlices& tokens) const;

  struct Loss {
    LossSums sums;  // cross_entropy_sums()
    // bool [B, T]: the target is the id with the largest logit, of equal ones the smallest.
    at::Tensor correct_BT;  // undefined if it was not asked for
  };
  // Without gradients, no more than 2^26 logits exist at a time.
  Loss loss(const at::Tensor& x_BTC, const TokenSlices& tokens, const at::Tensor& targets_BT,
            const at::Tensor& mask_BT, double label_smoothing = 0, bool with_correct = false) const;

  // StepDecoder::decode_step() of the stack with the embedding before it.
  at::Tensor decode_step(const TokenEmbedding& embedding, const Stack& stack, DecodeCache& cache,
                         const at::Tensor& tokens_B) const;

  // Forward FLOPs of one token, on all ranks of the tensor axis together.
  double flops() const;

 private:
  // The logits for this rank's ids, in the compute dtype.
  at::Tensor part_of_logits(const at::Tensor& x, const TokenSlices& tokens) const;
  Loss loss_of(const at::Tensor& logits_BTv, const at::Tensor& targets_BT,
               const at::Tensor& mask_BT, double label_smoothing, bool with_correct) const;

  const Parameters& parameters_;
  std::int64_t vocabulary_;
  std::optional<Linear> down_;  // from C to E, of a factorized embedding
  // This rank's rows; the embedding table itself if embeddings are tied.
  at::Tensor weight_VE;
  std::vector<int> units_;  // of the parameters that it reads
};

}  // namespace birkhoff
