// Gradients of weights that a backward pass computes later than it could: while it waits for other
// ranks. Nothing else in the pass depends on them, so ranks that are not equally fast wait less for
// one another. (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", fill the idle times of
// pipelines with them.)
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace birkhoff {

// Both are called by backward functions, on the thread that runs them.

// Adds gradient() to weight's gradient in the next compute_deferred_gradients(), at the latest when
// the backward pass ends; with recomputation, the pass through the recomputed part. weight: a leaf
// that requires gradients. It must not be an input of the autograd function, because its hooks
// would then run twice.
void defer_gradient(const at::Tensor& weight, std::function<at::Tensor()> gradient);

// Computes what this pass has deferred, in that order. Call it between the start of an exchange and
// the wait for it.
void compute_deferred_gradients();

}  // namespace birkhoff
