// The values of parameters with ZeRO stage 3 (Rajbhandari et al. 2020, section 5.3): a rank keeps
// one slice of each bucket, and gathers a bucket before a part of the network reads it. While the
// part runs, the buckets of the part that follows are gathered, too. Other buckets have no memory.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "cluster/base/collectives/process_group.h"
#include "cluster/base/tensors/parameters.h"
#include "cluster/base/tensors/tensor_memory.h"
#include "runtime/gradients/grad_bucket.h"

namespace birkhoff {

class GatheredValues {
 public:
  // buckets: their values have no memory, and each rank of the group keeps own_values.
  // buckets_of[u]: those that have parameters of unit u. memory: where values get theirs. All must
  // outlive this object.
  GatheredValues(ProcessGroup& group, std::vector<GradBucket>& buckets,
                 std::vector<std::vector<std::size_t>> buckets_of, TensorMemory& memory);

  // As in ParameterSlices. Units must be used in the same order on all ranks. Collective over the
  // group.
  void begin_use(const std::vector<int>& units);
  void end_use(const std::vector<int>& units);
  void use_in_backward(const std::vector<int>& units);
  // Between these two a backward pass runs: units are used in the reverse order. Local.
  void begin_backward() { backward_ = true; }
  void end_backward();
  // Call when own_values have changed: they are gathered again before their next use. Local.
  void forget();

 private:
  struct Residence {
    int uses = 0;              // of forward passes
    bool in_backward = false;  // used by the backward pass
    std::unique_ptr<Work> gather;
    bool idle() const { return uses == 0 && !in_backward; }
  };
  std::vector<std::size_t> buckets_of(const std::vector<int>& units) const;
  // Of a unit that may not exist.
  std::vector<std::size_t> buckets_of(std::optional<int> unit) const;
  void start_gather(std::size_t bucket);
  // Gathers the buckets of these units, and starts with those of unit `next`, if there is one.
  void gather(const std::vector<int>& units, std::optional<int> next);
  // Frees the values of all buckets that are not in use, except those of unit `next`.
  void free_idle(std::optional<int> next = {});

  ProcessGroup& group_;
  std::vector<GradBucket>& buckets_;
  const std::vector<std::vector<std::size_t>> buckets_of_;
  TensorMemory& memory_;
  std::vector<Residence> residences_;  // of each bucket
  int num_uses_ = 0;
  bool backward_ = false;
};

}  // namespace birkhoff
