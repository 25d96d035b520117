// The loss of a micro-batch, as sums.
//
// Legend: B batch, N tokens of the batch (of past: layers), T tokens, M tokens before them, V
// vocabulary, C channels.
#pragma once

#include <ATen/core/Tensor.h>

#include "cluster/base/tensors/named_sums.h"

namespace birkhoff {

class ProcessGroup;

// Sums over a micro-batch, never means: sums can be added over micro-batches and ranks, and the
// trainer divides once.
struct LossSums {
  // 0-dim, differentiable: weighted sum of nats over counted targets, plus auxiliary losses.
  at::Tensor loss;
  at::Tensor nats;  // 0-dim fp64: sum of nats over counted targets, no gradient
  // Of models that predict tokens, in evaluation: the nats [N] of each target, 0 where it does not
  // count.
  at::Tensor nats_N;
  at::Tensor count;  // 0-dim fp64: number of counted targets
  // 0-dim fp64: sum of their weights in `loss`, by which training divides its sum. Undefined: all
  // weights are 1.
  at::Tensor weight;
  // 0-dim fp64: number of tokens read, without padding. Undefined: as many as counted targets.
  at::Tensor tokens;
  // Of classifiers: the likeliest class of each sample, int64 [B].
  at::Tensor predicted_B;
  // No gradients. Those that the model's figures need, 0-dim, and in training those of its
  // statistics, in their shape.
  NamedSums named;
  // Of a model that carries state from a sequence to the next one (Model::past_shape): what the
  // next batch has as field::kPast. No gradients.
  at::Tensor past_BNMC{};
};

// Adds the sums of a model's layers: each "<...>.auxiliary_loss" [B] to the loss, and all to
// `named`. With a tensor-parallel group each rank has the sums of its heads: those of figures are
// added up over the group, collectively; those of statistics stay where their heads are.
// `targets_per_token_B` weighs the auxiliary losses of the samples, which are sums over tokens,
// while the loss is a sum over targets; undefined: as many targets as tokens. It depends on the
// sample only, so the sum does not depend on how the global batch is cut. `weight_B`: of the
// samples in the loss, not in `named`; undefined: all are 1.
void add_layer_sums(const NamedSums& layers, LossSums& sums, ProcessGroup* tensor_group,
                    const at::Tensor& targets_per_token_B = {}, const at::Tensor& weight_B = {});

// Cross entropy of logits [B, T, V] against targets [B, T] (int64), summed over the tokens whose
// mask [B, T] (u8) is not 0; targets of other tokens are never read. Log-softmax in fp32 (fp64 for
// fp64 logits); sums of nats and counts in fp64. The loss, and not the nats, has label smoothing
// (models/losses/fused_cross_entropy.h). It may overwrite the logits.
LossSums cross_entropy_sums(const at::Tensor& logits_BTV, const at::Tensor& targets_BT,
                            const at::Tensor& mask_BT, double label_smoothing = 0);

}  // namespace birkhoff
