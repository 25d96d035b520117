// Autograd of block mixing: a mix returns each y, then each x for its other consumers, so that the
// gradient of an x is added up in one pass.
//
// Legend: B batch, H heads, N blocks, b tokens of a block, D head dim.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include <iterator>
#include <utility>

#include "attention/kernels/block_mix/block_mix.h"

namespace birkhoff {

// f(x) of each tensor.
template <typename F>
torch::autograd::variable_list each_of(at::TensorList tensors, const F& f) {
  torch::autograd::variable_list results;
  for (const at::Tensor& x : tensors) results.push_back(f(x));
  return results;
}

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

// What apply() of the autograd function returned.
inline BlockMixes mixes_of(const torch::autograd::variable_list& outputs) {
  const auto end_y = outputs.begin() + std::ssize(outputs) / 2;
  return {{outputs.begin(), end_y}, {end_y, outputs.end()}};
}

// The gradients of the weights, of each x, and none of the last argument.
inline torch::autograd::variable_list mix_gradients(torch::autograd::variable_list of_weights,
                                                    const torch::autograd::variable_list& d_x) {
  of_weights.insert(of_weights.end(), d_x.begin(), d_x.end());
  of_weights.emplace_back();
  return of_weights;
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
