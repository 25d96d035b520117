// The activations of a model that is divided over a tensor-parallel group (Shoeybi et al. 2019,
// "Megatron-LM", section 3): sublayers compute with a part of their heads or hidden units on all
// tokens; between them each rank has an equal slice of the tokens (Korthikanti et al. 2022, section
// 4.2.2).
//
// Each rank's backward pass computes one term of each gradient; the gradient is the sum of the
// terms over the ranks. A parameter that every rank holds gets a term on each, which GradBuckets
// adds up. A parameter that is divided gets its whole gradient where it is.
//
// Legend: B batch, T tokens, C channels, n rows of a slice, I inputs, O outputs on this rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "cluster/base/random/philox.h"
#include "cluster/base/tensors/placement.h"

namespace birkhoff {

class TokenSlices {
 public:
  TokenSlices() = default;  // a model on one rank
  // Tokens [B, T] of a model that is placed there. A slice has the next ceil(B T / ranks) tokens;
  // the last slices are filled up with rows whose outputs are dropped and whose gradients are 0.
  TokenSlices(const ModelPlacement& place, std::int64_t batch, std::int64_t tokens);

  // False: slices are whole tensors [B, T, C], and no function communicates.
  bool divided() const { return group_ != nullptr; }

  // This rank's rows [n, C] of a tensor [B, T, C], or [n] of [B, T], which each rank has. Local.
  at::Tensor mine(const at::Tensor& x_BTC) const;
  // [B, T, C] from the slices [n, C] of all ranks. The functions below are collective over
  // the group, as are their backward passes.
  at::Tensor gather(const at::Tensor& x_nC) const;
  // The slice [n, C] of the sum over ranks of [B, T, C].
  at::Tensor sum(const at::Tensor& part_BTC) const;

  struct Product {
    at::Tensor y_BTO, x_BTC;
  };
  // Where gradients are recorded, x of the two products below must need one. The gradient of a
  // weight that the model uses only once, a leaf, is deferred until a later backward pass of
  // linear_sum(), gather_linear() or sum() (models/parallel/deferred_gradients.h).
  //
  // x = gather(x_nC) and y = rounded_linear(x, weight, bias). The backward pass gathers x again
  // instead of keeping it.
  Product gather_linear(const at::Tensor& x_nC, const at::Tensor& weight_OC,
                        const at::Tensor& bias_O, bool used_once) const;
  // sum(rounded_linear(x, weight)) of a weight that is used once. Only if divided().
  at::Tensor linear_sum(const at::Tensor& x_BTI, const at::Tensor& weight_OI) const;

  // philox_dropout() of a slice [n, C], and of this rank's part of a tensor [B, T, columns] whose
  // columns are divided evenly: the bits of the whole tensor's.
  at::Tensor drop(const at::Tensor& x_nC, float p, const NoiseKey& key, NoisePurpose purpose) const;
  at::Tensor drop_columns(const at::Tensor& x_BTc, std::int64_t columns, float p,
                          const NoiseKey& key, NoisePurpose purpose) const;
  // A slice [n, C] in which all channels of a token are 0 with probability p. The other tokens are
  // not scaled. Token t of a sample depends on the key and t only.
  at::Tensor drop_tokens(const at::Tensor& x_nC, float p, const NoiseKey& key) const;

 private:
  // [B, T, C] of the gathered rows, without those behind the last token.
  at::Tensor of_tokens(const at::Tensor& x_NC) const;

  ProcessGroup* group_ = nullptr;
  std::int64_t batch_ = 0, tokens_ = 0;
  std::int64_t slice_ = 0;  // rows of a slice
};

}  // namespace birkhoff
