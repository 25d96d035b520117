// The use of units of parameters by one part of the network. If a rank keeps only slices of the
// parameters, it gets the values here before the part reads them, in the forward and in the
// backward pass.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "cluster/base/tensors/parameters.h"

namespace birkhoff {

class ParameterUse {
 public:
  // The part may read the values of these units until the object's end. Collective with slices, as
  // is the backward pass of output(). `parameters` must outlive it and the graph.
  ParameterUse(const Parameters& parameters, std::vector<int> units);
  ~ParameterUse();
  ParameterUse(const ParameterUse&) = delete;
  ParameterUse& operator=(const ParameterUse&) = delete;

  // The part's output y, through which all gradients of these parameters must pass.
  at::Tensor output(const at::Tensor& y) const;

 private:
  ParameterSlices* const slices_;  // null: nothing to do
  const std::vector<int> units_;
};

}  // namespace birkhoff
