// Named shards of state: what a checkpoint, a replica hash and an export are made of. A shard is a flat range inside a
// box of a global tensor: a whole parameter is the whole range of the whole box, a tensor-parallel column slice is a box,
// an optimizer's slice of a bucket a flat range. Whoever can name its shards can read what any other mesh wrote.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace birkhoff {

enum class StateKind { kParameter, kOptimizer, kStatistic };

struct NamedShard {
  std::string name;  // of the global tensor, for instance "blocks.0.norm1.weight" or "adamw.m/blocks.0.norm1.weight"
  StateKind kind = StateKind::kParameter;
  std::vector<std::int64_t> global_shape;
  std::vector<std::int64_t> box_offset, box_size;  // one entry a dimension
  std::int64_t flat_begin = 0, flat_end = 0;       // row-major inside the box
  int owner = 0;      // rank of the world that writes it; all ranks list all shards they hold, the owner writes
  at::Tensor data;    // contiguous 1-D [flat_end - flat_begin]; a view of live state, filled in place on load
};

// A shard that is a whole tensor. `tensor` must be contiguous; data is a view of it.
NamedShard whole_shard(std::string name, StateKind kind, const at::Tensor& tensor, int owner);

}  // namespace birkhoff
