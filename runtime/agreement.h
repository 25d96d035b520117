// Checks that all ranks hold the same bits: data-parallel replicas that diverge silently (a flipped
// memory bit, a faulty CPU or network card) train a model that no rank intended.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cluster/base/collectives/process_group.h"
#include "runtime/checkpoint/tensor_part.h"
#include "runtime/train_state.h"

namespace birkhoff {

class Agreement {
 public:
  // parts: parameters and optimizer state of this rank, as views of live memory. Parts that every
  // rank of `ranks` replicates are compared; the others (ZeRO's slices) have no second copy. host:
  // this rank's machine, for messages.
  Agreement(ProcessGroup& ranks, std::vector<TensorPart> parts, std::string host);

  // Compares 64-bit XXH3 hashes of every replicated part, and of the step, positions and counters,
  // which key all noise. Returns "" if all ranks agree. Otherwise returns one line, the same on all
  // ranks: which ranks differ from the majority (all ranks are named if there is none), in which
  // tensors, and an example. Collective; one small all_gather while all ranks agree.
  std::string find_difference(const TrainState& state);

 private:
  std::string describe(const at::Tensor& hashes, const std::string& position);

  ProcessGroup& ranks_;
  const std::vector<TensorPart> replicated_;
  const std::string host_;
};

}  // namespace birkhoff
