// The loss and the accuracy of a classifier, whose samples have one target each.
//
// Legend: B batch, K classes.
#pragma once

#include "models/losses/loss_sums.h"

namespace birkhoff {

// The cross entropy of logits [B, K] with labels [B] (int64), whose sum "accuracy" is the number of
// samples whose label is the likeliest class. It may overwrite the logits.
LossSums classification_sums(const at::Tensor& logits_BK, const at::Tensor& labels_B);

// The figure of that sum.
Figure accuracy_figure();

}  // namespace birkhoff
