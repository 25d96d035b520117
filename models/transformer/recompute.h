// Activation recomputation (Chen et al. 2016, "Training deep nets with sublinear memory cost"): a
// part of the network keeps only its inputs instead of everything that its backward pass reads, and
// is computed a second time in that pass.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace birkhoff {

// A part of the network, as a function from its inputs to its outputs. The outputs are
// floating-point tensors that depend only on the inputs and on parameters. A part must return the
// same bits each time (noise is keyed, never drawn). It must own everything else that it reads,
// because it is kept until the backward pass.
using NetworkPart = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs)>;

// Returns part(inputs), with the same outputs and gradients as a plain call, but keeps only
// `inputs` in memory between the passes. Either all defined inputs require gradients or none does.
// The backward pass adds the gradients of parameters to the parameters while it recomputes, so each
// gradient hook still runs exactly once.
std::vector<at::Tensor> recomputed(NetworkPart part, const std::vector<at::Tensor>& inputs);

}  // namespace birkhoff
