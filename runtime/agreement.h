// Makes sure that all ranks hold the same bits: data-parallel replicas that drift apart (a flipped
// bit of memory, a faulty processor or network card) train something that no rank means.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cluster/base/collectives/group.h"
#include "runtime/checkpoint/named_shard.h"
#include "runtime/train_state.h"

namespace birkhoff {

class Agreement {
 public:
  // shards: parameters and optimizer state of this rank as views of live memory. Those that every
  // rank of `ranks` holds, the same on each, are compared; others (ZeRO's slices) have no second.
  // host: this rank's machine, for messages.
  Agreement(Group& ranks, std::vector<NamedShard> shards, std::string host);

  // Compares 64-bit XXH3 hashes of every such shard, and of step, positions and counters, which key
  // all noise. Returns nothing if all ranks agree; else one line, the same on all ranks: who
  // differs from the majority (everybody is named where there is none), in which tensors, and an
  // example. Collective; one small all_gather while all agree.
  std::string find_difference(const TrainState& state);

 private:
  std::string describe(const at::Tensor& hashes, const std::string& position);

  Group& ranks_;
  const std::vector<NamedShard> replicated_;
  const std::string host_;
};

}  // namespace birkhoff
