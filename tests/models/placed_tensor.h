// The part of a tensor that a placement names.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "cluster/base/tensors/placement.h"

namespace birkhoff {

// The elements of a global tensor, in the shape of the rank's tensor.
inline at::Tensor part_of(const at::Tensor& global, const TensorPlacement& placement) {
  std::vector<at::Tensor> boxes;
  for (const TensorBox& box : placement.boxes) {
    at::Tensor part = global;
    for (std::size_t d = 0; d < box.size.size(); ++d) {
      part = part.narrow(static_cast<std::int64_t>(d), box.offset[d], box.size[d]);
    }
    boxes.push_back(part.reshape({-1}));
  }
  return at::cat(boxes).view(local_shape(placement));
}

}  // namespace birkhoff
