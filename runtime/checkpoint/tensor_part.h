// Named parts of state, of which checkpoints and replica hashes consist. A part is a flat range
// inside a box of a global tensor: a whole parameter is the whole range of the whole box, a
// tensor-parallel column slice is a box, an optimizer's slice of a bucket is a flat range. A
// program that can name its parts can read what any other mesh wrote.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cluster/base/tensors/placement.h"
#include "cluster/base/tensors/tensor_region.h"

namespace birkhoff {

// kPast: what training carries from step to step (runtime/carried_past.h).
enum class StateKind { kParameter, kOptimizer, kStatistic, kPast };
// Whether the state belongs to the model, and not only to its training.
inline bool is_of_model(StateKind kind) {
  return kind == StateKind::kParameter || kind == StateKind::kStatistic;
}

struct TensorPart {
  std::string name;  // of the global tensor, for instance "blocks.0.attention_norm.weight" or
                     // "adamw.m/blocks.0.attention_norm.weight"
  StateKind kind = StateKind::kParameter;
  TensorRegion region;
  int owner = 0;  // all ranks list all parts they hold; this rank of the world writes the part, or
                  // sends it to the writer of the whole tensor (whole_tensors.h)
  bool replicated = true;  // all data-parallel ranks hold these elements; false: a slice of ZeRO
  at::Tensor data;  // contiguous 1-D [region.num_elements()]; a view of live state, filled in place
                    // on load
};

// A part that is a whole tensor. `tensor` must be contiguous; data is a view of it.
TensorPart whole_part(std::string name, StateKind kind, const at::Tensor& tensor, int owner);

// The parts that elements `range` (row-major) of a rank's tensor are, one for each box that holds
// some of them, or an empty part of its first box. data_n: these elements, contiguous; the parts'
// data are views of it.
std::vector<TensorPart> placed_parts(const std::string& name, StateKind kind,
                                     const TensorPlacement& placement, Interval range,
                                     const at::Tensor& data_n);

// Assigns items of these sizes to `num_ranks` owners so that all have about as many bytes: the
// largest item first, each to the rank with the fewest so far. Returns the owner of each item.
std::vector<int> balanced_owners(const std::vector<std::int64_t>& bytes, int num_ranks);
// Sets the owners of parts by their bytes. For state that every rank holds; all ranks must list
// the same parts.
void balance_owners(std::vector<TensorPart>& parts, int num_ranks);

}  // namespace birkhoff
