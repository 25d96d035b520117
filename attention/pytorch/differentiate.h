// Gradients of the operators without a graph from the forward pass: the part of it that autograd
// needs runs again.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "attention/kernels/relative_positions/relative_positions.h"
#include "attention/pytorch/calls.h"
#include "cluster/base/random/philox.h"

namespace birkhoff::ops {

// Tensors, and the gradients of the loss with respect to them.
struct Differentiated {
  Tensors values, gradients;
};

// Returns the gradients of the loss with respect to `inputs`, in their layout. `run` computes
// values from the inputs; it runs under autograd here, because the kernel of an operator runs below
// autograd. Inputs that it does not read have gradient 0.
Tensors differentiate(const std::function<Differentiated(const Tensors&)>& run,
                      at::TensorList inputs);

// The gradient of an input that a call does not read: zeros.
at::Tensor no_gradient(const at::Tensor& input);

// Returns x in the layout that autograd, compiled graphs and the kernel's meta function all expect.
at::Tensor laid_out_as(const at::Tensor& model, const at::Tensor& x);

// What a tensor must be that a backward pass gets from the forward pass or from the caller.
struct Expected {
  const char* name;
  at::ScalarType dtype;
  std::vector<std::int64_t> sizes;
};
void check_given(at::TensorList given, const std::vector<Expected>& expected);

// The noise of attention dropout (calls.h); none without dropout.
std::optional<NoiseKey> noise_of(double dropout, const std::optional<at::Tensor>& seed,
                                 const at::Tensor& q);

// The optional logit terms among a call's inputs (calls.h). Undefined where absent.
struct GivenTerms {
  RelativePositions relative;
  at::Tensor sink_H;
};
GivenTerms terms_of(at::TensorList inputs, bool causal);

}  // namespace birkhoff::ops
