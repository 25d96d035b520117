// Activation recomputation (Chen et al. 2016, "Training deep nets with sublinear memory cost"): a
// part of the network keeps its input instead of all that its backward pass reads, and is computed
// a second time when that pass comes.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace birkhoff {

// A part of the network: from its input to its outputs, which are floating-point tensors and
// depend on nothing but the input and on parameters. It must give the same bits each time (noise is
// keyed, never drawn) and own whatever else it reads: it is kept until the backward pass.
using NetworkPart = std::function<std::vector<at::Tensor>(const at::Tensor& input)>;

// part(input), with the outputs and gradients that the call itself would give, and the memory of
// `input` alone between the passes. The backward pass adds parameters' gradients to the parameters
// while it recomputes, so the hooks of their accumulators run once, as ever.
std::vector<at::Tensor> recomputed(NetworkPart part, const at::Tensor& input);

}  // namespace birkhoff
