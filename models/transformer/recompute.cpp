#include "models/transformer/recompute.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace birkhoff {
namespace {

using torch::autograd::variable_list;

// The same values without their history, as the leaves of a new graph.
variable_list leaves_of(const variable_list& inputs) {
  variable_list leaves;
  for (const at::Tensor& input : inputs) {
    leaves.push_back(input.defined() ? input.detach().set_requires_grad(true) : input);
  }
  return leaves;
}

// The node that replaces a part in the outer graph: its backward pass computes the part again.
class Recomputation : public torch::autograd::Node {
 public:
  Recomputation(NetworkPart part, const variable_list& inputs)
      : Node(torch::autograd::collect_next_edges(inputs)),
        part_(std::move(part)),
        inputs_(leaves_of(inputs)) {}

  variable_list apply(variable_list&& gradients) override {
    const variable_list inputs = leaves_of(inputs_);
    variable_list outputs, output_gradients;
    {
      const c10::AutoGradMode with_gradients(true);
      const std::vector<at::Tensor> all = part_(inputs);
      for (std::size_t i = 0; i < all.size(); ++i) {
        if (!gradients[i].defined() || !all[i].requires_grad()) continue;
        outputs.push_back(all[i]);
        output_gradients.push_back(gradients[i]);
      }
    }
    torch::autograd::backward(outputs, output_gradients);
    variable_list input_gradients;
    for (const at::Tensor& input : inputs) {
      input_gradients.push_back(input.defined() ? input.grad() : input);
    }
    return input_gradients;
  }

  void release_variables() override {
    part_ = nullptr;
    inputs_.clear();
  }

 private:
  NetworkPart part_;
  variable_list inputs_;
};

}  // namespace

std::vector<at::Tensor> recomputed(NetworkPart part, const std::vector<at::Tensor>& inputs) {
  if (!c10::GradMode::is_enabled() || !inputs.front().requires_grad()) return part(inputs);
  // Records a graph and drops it at once: some LibTorch operations (matmul is one) choose their
  // algorithm by which inputs need gradients, and both passes must choose the same.
  std::vector<at::Tensor> outputs = part(leaves_of(inputs));
  for (at::Tensor& output : outputs) output = output.detach();
  torch::autograd::set_history(
      outputs, std::shared_ptr<torch::autograd::Node>(new Recomputation(std::move(part), inputs),
                                                      torch::autograd::deleteNode));
  return outputs;
}

}  // namespace birkhoff
