#include "models/recompute.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace birkhoff {
namespace {

using torch::autograd::variable_list;

// Stands in the outer graph for all that a part's backward pass needs.
class Recomputation : public torch::autograd::Node {
 public:
  Recomputation(NetworkPart part, const at::Tensor& input)
      : Node(torch::autograd::collect_next_edges(input)),
        part_(std::move(part)),
        input_(input.detach()) {}

  variable_list apply(variable_list&& gradients) override {
    const at::Tensor input = input_.detach().set_requires_grad(true);
    variable_list outputs, output_gradients;
    {
      const c10::AutoGradMode with_gradients(true);
      const std::vector<at::Tensor> all = part_(input);
      for (std::size_t i = 0; i < all.size(); ++i) {
        if (!gradients[i].defined() || !all[i].requires_grad()) continue;
        outputs.push_back(all[i]);
        output_gradients.push_back(gradients[i]);
      }
    }
    torch::autograd::backward(outputs, output_gradients);
    return {input.grad()};
  }

  void release_variables() override {
    part_ = nullptr;
    input_.reset();
  }

 private:
  NetworkPart part_;
  at::Tensor input_;
};

}  // namespace

std::vector<at::Tensor> recomputed(NetworkPart part, const at::Tensor& input) {
  if (!c10::GradMode::is_enabled() || !input.requires_grad()) return part(input);
  // With a graph, which is dropped at once: LibTorch's operations choose algorithms by what needs
  // gradients (matmul does), and both passes must choose the same.
  std::vector<at::Tensor> outputs = part(input.detach().set_requires_grad(true));
  for (at::Tensor& output : outputs) output = output.detach();
  torch::autograd::set_history(
      outputs, std::shared_ptr<torch::autograd::Node>(new Recomputation(std::move(part), input),
                                                      torch::autograd::deleteNode));
  return outputs;
}

}  // namespace birkhoff
