// Gradients of the operators without a graph from the forward pass: the part of it that autograd
// needs runs again.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "attention/kernels/relative_positions/relative_positions.h"

namespace birkhoff::ops {

using Tensors = std::vector<at::Tensor>;

// Tensors, and the gradients of the loss with respect to them.
struct Differentiated {
  Tensors values, gradients;
};

// Returns the gradients of the loss with respect to `inputs`, in their layout. `run` computes
// values from the inputs; it runs under autograd here, because the kernel of an operator runs below
// autograd. Inputs that it does not read have gradient 0.
Tensors differentiate(const std::function<Differentiated(const Tensors&)>& run,
                      at::TensorList inputs);

// Returns x in the layout that autograd, compiled graphs and the kernel's meta function all expect.
at::Tensor laid_out_as(const at::Tensor& model, const at::Tensor& x);

// Checks the tensors that a backward pass gets from the forward pass or from the caller.
void check_saved(const char* name, const at::Tensor& x, at::ScalarType dtype,
                 at::IntArrayRef sizes);

// The optional logit terms among a call's inputs (calls.h). Undefined where absent.
struct GivenTerms {
  RelativePositions relative;
  at::Tensor sink_H;
};
GivenTerms terms_of(at::TensorList inputs, bool causal);

}  // namespace birkhoff::ops
