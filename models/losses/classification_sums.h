// The loss and the accuracy of a classifier, whose samples have one target each.
//
// Legend: B batch, K classes.
#pragma once

#include <optional>

#include "cluster/base/random/philox.h"
#include "data/batch/batch.h"
#include "models/losses/loss_sums.h"

namespace birkhoff::configs {
class Task;
}

namespace birkhoff {

// The class weights [K] of a task; undefined: it has none.
at::Tensor class_weights(const configs::Task& task, const at::TensorOptions& options);
// The weight of each sample of a batch. Evaluations (without noise) have none, so that their losses
// are those of the split as it is.
at::Tensor training_weights(const at::Tensor& class_weight_K, const Batch& batch,
                            const std::optional<NoiseKey>& noise);

// The cross entropy of logits [B, K] with labels [B] (int64), whose sum "accuracy" is the number of
// samples whose label is the likeliest class. `weight_B`: of the samples in the loss, as in
// PyTorch's CrossEntropyLoss; undefined: all are 1. It may overwrite the logits.
LossSums classification_sums(const at::Tensor& logits_BK, const at::Tensor& labels_B,
                             const at::Tensor& weight_B = {});

// The figure of that sum.
Figure accuracy_figure();

}  // namespace birkhoff
