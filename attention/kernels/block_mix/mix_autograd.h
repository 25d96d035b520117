// Autograd of block mixing: a mix returns each y, then each x for its other consumers, so that the
// gradient of an x is added up in one pass.
//
// Legend: B batch, H heads, N blocks, b tokens of a block, D head dim.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include <utility>

namespace birkhoff {

// The end of a forward pass: saves x and what else the backward pass reads, and returns the
// outputs.
inline torch::autograd::variable_list mix_outputs(torch::autograd::AutogradContext* context,
                                                  torch::autograd::variable_list saved,
                                                  torch::autograd::variable_list y_BHNbD,
                                                  at::TensorList x_BHNbD) {
  context->save_for_backward(std::move(saved));
  context->set_materialize_grads(false);
  y_BHNbD.insert(y_BHNbD.end(), x_BHNbD.begin(), x_BHNbD.end());
  return y_BHNbD;
}

// The gradients of each y, 0 if it has none, and those that the other consumers of each x found,
// undefined if there are none. `aligned` makes the rows that a kernel reads.
struct MixGradients {
  template <typename Aligned>
  MixGradients(const torch::autograd::variable_list& gradients,
               const torch::autograd::variable_list& x, const Aligned& aligned) {
    for (std::size_t i = 0; i < x.size(); ++i) {
      const at::Tensor &of_y = gradients[i], &other = gradients[x.size() + i];
      d_y.push_back(of_y.defined() ? aligned(of_y) : at::zeros_like(x[i]));
      others.push_back(other.defined() ? aligned(other) : other);
    }
  }

  torch::autograd::variable_list d_y, others;
};

}  // namespace birkhoff
