// A record of what a stack's forward pass computes inside, for analyses of trained models. Local to
// a thread.
//
// Legend: B batch, T tokens, C channels.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "attention/mechanism.h"

namespace birkhoff {

struct RecordedAttention {
  std::string name;            // of the head group: "blocks.0.attention.groups.1"
  const Mechanism* mechanism;  // the model's
  AttentionInput in;
};

// While it exists, forward passes on this thread append to it. It keeps the tensors that they
// append. At most one per thread at a time.
class ForwardRecord {
 public:
  ForwardRecord();
  ~ForwardRecord();
  ForwardRecord(const ForwardRecord&) = delete;
  ForwardRecord& operator=(const ForwardRecord&) = delete;

  // This thread's record; null: there is none.
  static ForwardRecord* current();

  std::vector<RecordedAttention> attentions;  // layer after layer, group after group
  std::vector<at::Tensor> streams_BTC;  // the residual stream: the inputs, then after each layer
};

}  // namespace birkhoff
