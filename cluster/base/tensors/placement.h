// Placements: the device and the tensor-parallel ranks of a model, and the elements of a parameter
// that one of these ranks holds.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "cluster/base/interval.h"

namespace birkhoff {

class ProcessGroup;

// The ranks and the device of one replica of a model.
struct ModelPlacement {
  // A replica on one rank.
  ModelPlacement(at::Device of_rank) : device(of_rank) {}
  ModelPlacement(at::DeviceType of_rank) : device(of_rank) {}
  // A replica over the ranks of `group`. Null, or a group of one: a replica on one rank.
  // `replicas`: the data-parallel ranks. Groups must outlive the model.
  ModelPlacement(at::Device of_rank, ProcessGroup* group, ProcessGroup* replicas = nullptr);

  at::Device device;
  ProcessGroup* tensor = nullptr;        // null: the replica is on one rank
  int tensor_rank = 0, tensor_size = 1;  // of that group
  // The ranks that hold the replicas, each with its part of a batch; null: this one only. Only
  // batch norms communicate with them.
  ProcessGroup* data = nullptr;
  // Whether parameters get no memory when they are added, because ranks will hold slices of them
  // (ZeRO stage 3): Parameters::initial_values() gives their values.
  bool sliced = false;
};

// Elements of a global tensor: a range of each dimension.
struct TensorBox {
  std::vector<std::int64_t> offset, size;  // one entry per dimension
};

// The elements of a global tensor that a rank holds.
struct TensorPlacement {
  std::vector<std::int64_t> global_shape;
  // The rank's tensor is, row-major, the elements of these boxes, one box after another.
  std::vector<TensorBox> boxes;

  // Every rank of the tensor axis holds the whole tensor.
  bool is_whole() const { return boxes.size() == 1 && boxes[0].size == global_shape; }
};

// How a dimension of a tensor is divided over the ranks of the tensor axis.
struct Split {
  int dim = -1;  // -1: not divided; every rank holds the whole tensor
  // Ranges of that dimension, each of which is divided into nearly equal parts, one for each rank;
  // empty: the whole dimension is one. Several ranges of a dimension other than 0 would not be
  // boxes one after another: Error(kInternal).
  std::vector<Interval> sections{};
};

// The placement on rank `rank` of `size` of a tensor of this shape.
TensorPlacement place_tensor(std::vector<std::int64_t> global_shape, const Split& split, int rank,
                             int size);

// The shape of the rank's tensor.
std::vector<std::int64_t> local_shape(const TensorPlacement& placement);

}  // namespace birkhoff
