#include "models/parallel/parameter_use.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <utility>

namespace birkhoff {
namespace {

using torch::autograd::variable_list;

// The identity, applied to a part's output: its backward pass runs before that of the part.
class EndOfPart : public torch::autograd::Node {
 public:
  EndOfPart(const at::Tensor& y, ParameterSlices& slices, const std::vector<int>& units)
      : Node(torch::autograd::collect_next_edges(y)), slices_(slices), units_(units) {}

  variable_list apply(variable_list&& gradients) override {
    slices_.use_in_backward(units_);
    return std::move(gradients);
  }

 private:
  ParameterSlices& slices_;  // outlive the graph
  const std::vector<int> units_;
};

}  // namespace

ParameterUse::ParameterUse(const Parameters& parameters, std::vector<int> units)
    : slices_(parameters.slices()), units_(std::move(units)) {
  if (slices_ != nullptr) slices_->begin_use(units_);
}

ParameterUse::~ParameterUse() {
  if (slices_ != nullptr) slices_->end_use(units_);
}

at::Tensor ParameterUse::output(const at::Tensor& y) const {
  if (slices_ == nullptr || !y.requires_grad()) return y;
  at::Tensor same = y.detach();
  torch::autograd::set_history(
      same, std::shared_ptr<torch::autograd::Node>(new EndOfPart(y, *slices_, units_),
                                                   torch::autograd::deleteNode));
  return same;
}

}  // namespace birkhoff
