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
  // parts: parameters and optimizer state of this rank, as views of live memory. Whole tensors are
  // compared over the world, parts of tensors over `replicas`, the ranks that hold the same parts
  // (a data axis of the mesh). ZeRO's slices are compared over `copies`, if it is not null, and
  // those of whole tensors over `tensor`, the tensor axis; other copies do not exist. host: this
  // rank's machine, for messages. The groups are on hosts.
  Agreement(ProcessGroup& world, ProcessGroup& replicas, const std::vector<TensorPart>& parts,
            std::string host, ProcessGroup* copies = nullptr, ProcessGroup* tensor = nullptr);

  // Compares 64-bit XXH3 hashes of every replicated part, and of the step, positions and counters,
  // which key all noise. Returns "" if all ranks agree. Otherwise returns one line, the same on all
  // ranks: which ranks differ from the majority (all ranks are named if there is none), in which
  // tensors, and an example. Collective over the world; one small all_gather while all ranks agree,
  // and two more for each further comparison.
  std::string find_difference(const TrainState& state);

 private:
  // Ranks that hold the same parts.
  struct Comparison {
    ProcessGroup& ranks;
    std::vector<TensorPart> parts;
    std::vector<int> world_ranks;
  };
  std::string find_difference(const Comparison& comparison, const std::string& position) const;
  std::string describe(const Comparison& comparison, const at::Tensor& hashes,
                       const std::string& position) const;

  ProcessGroup& world_;
  std::vector<Comparison> comparisons_;  // the world first; the same number on all ranks
  const std::string host_;
};

}  // namespace birkhoff
