// Activation recomputation (Chen et al. 2016, "Training deep nets with sublinear memory cost"): a
// part of the network keeps its inputs instead of all that its backward pass reads, and is computed
// a second time when that pass comes.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace birkhoff {

// A part of the network: from its inputs to its outputs, which are floating-point tensors and
// depend on nothing but the inputs and on parameters. It must give the same bits each time (noise
// is keyed, never drawn) and own whatever else it reads: it is kept until the backward pass.
using NetworkPart = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs)>;

// part(inputs), with the outputs and gradients that the call itself would give, and the memory of
// `inputs` alone between the passes. Inputs that are defined require gradients, or none does. The
// backward pass adds parameters' gradients to the parameters while it recomputes, so the hooks of
// their accumulators run once, as ever.
std::vector<at::Tensor> recomputed(NetworkPart part, const std::vector<at::Tensor>& inputs);

}  // namespace birkhoff
