// Gradients that a backward pass defers: what they are, when they are computed, and that a failed
// pass leaves none behind.
#include "models/parallel/deferred_gradients.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cluster/base/error.h"
#include "model_fixture.h"
#include "tests/cluster/base/thread_group.h"

namespace birkhoff {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Steps {
  at::Tensor weight{};
  std::vector<std::string> log{};
  bool fails = false;
};

// x, which defers a gradient of 3 for the weight. In `computes`, deferred gradients are computed.
struct Deferring : torch::autograd::Function<Deferring> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, Steps* steps,
                            bool computes) {
    context->saved_data["steps"] = reinterpret_cast<std::int64_t>(steps);
    context->saved_data["computes"] = computes;
    return x.clone();
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    auto* const steps = reinterpret_cast<Steps*>(context->saved_data["steps"].toInt());
    if (context->saved_data["computes"].toBool()) {
      steps->log.emplace_back("exchange");
      if (steps->fails) throw std::runtime_error("lost");
      compute_deferred_gradients();
    }
    steps->log.emplace_back("defer");
    defer_gradient(steps->weight, [steps] {
      steps->log.emplace_back("compute");
      return at::full({2}, 3.0);
    });
    return {gradients[0], {}, {}};
  }
};

at::Tensor leaf() { return at::ones({2}).requires_grad_(); }

void backward_of_two(Steps& steps) {
  at::Tensor y = Deferring::apply(leaf(), &steps, /*computes=*/true);
  y = Deferring::apply(y, &steps, /*computes=*/false);
  y.sum().backward();
}

TEST(DeferredGradients, AreComputedInExchangesAndWhenThePassEnds) {
  Steps steps{.weight = leaf()};
  backward_of_two(steps);
  EXPECT_EQ(steps.log,
            (std::vector<std::string>{"defer", "exchange", "compute", "defer", "compute"}));
  EXPECT_TRUE(at::equal(steps.weight.grad(), at::full({2}, 6.0)));
  backward_of_two(steps);
  EXPECT_TRUE(at::equal(steps.weight.grad(), at::full({2}, 12.0)));
}

TEST(DeferredGradients, AFailedPassLeavesNone) {
  Steps failing{.weight = leaf(), .fails = true};
  EXPECT_THROW(backward_of_two(failing), std::runtime_error);
  EXPECT_EQ(failing.log, (std::vector<std::string>{"defer", "exchange"}));
  Steps next{.weight = leaf()};
  backward_of_two(next);
  EXPECT_FALSE(failing.weight.grad().defined());
  EXPECT_TRUE(at::equal(next.weight.grad(), at::full({2}, 6.0)));
}

TEST(DeferredGradients, OfLeavesOnly) {
  Steps steps{.weight = leaf() * 2};
  EXPECT_THROW(backward_of_two(steps), Error);
}

// Calls function() when a parameter's gradient has been added.
class WhenAdded : public torch::autograd::FunctionPostHook {
 public:
  explicit WhenAdded(std::function<void()> function) : function_(std::move(function)) {}
  variable_list operator()(const variable_list& outputs, const variable_list& /*inputs*/) override {
    function_();
    return outputs;
  }

 private:
  std::function<void()> function_;
};

// A rank computes the gradient of each matrix of a layer once in a pass; without recomputation,
// while an exchange of rows is running for which it does not wait yet.
void check_layers(bool recompute) {
  run_ranks(2, [&](ProcessGroup& group) {
    const TestModel test = make_test_model_of(
        "language_model {}", "attention { group { mechanism { dense {} } } }",
        {"model.channels=16", "model.heads=4", fmt::format("train.recompute={}", recompute)},
        {at::kCPU, &group});
    std::vector<std::shared_ptr<torch::autograd::Node>> accumulators;
    int num_matrices = 0, num_gradients = 0;
    for (const Parameter& parameter : test.model->parameters().list()) {
      if (parameter.name.find("blocks.") == std::string::npos || parameter.value.dim() != 2) {
        continue;
      }
      ++num_matrices;
      accumulators.push_back(torch::autograd::impl::grad_accumulator(parameter.value));
      accumulators.back()->add_post_hook(std::make_unique<WhenAdded>([&, name = parameter.name] {
        ++num_gradients;
        if (recompute) return;
        const OperationRing::Entry last = group.ring().current();
        EXPECT_TRUE(last.name == "tokens" || last.name == "sums of tokens") << name << last.name;
        EXPECT_FALSE(last.waiting || last.done) << name;
      }));
    }
    const Batch batch = make_batch(2, 16);
    test.model->loss_sums(batch, std::nullopt).loss.backward();
    EXPECT_EQ(num_matrices, 8);
    EXPECT_EQ(num_gradients, num_matrices);
  });
}
TEST(DeferredGradients, OfLayersAreComputedDuringExchanges) { check_layers(/*recompute=*/false); }
TEST(DeferredGradients, OfRecomputedLayersAreComputedOnce) { check_layers(/*recompute=*/true); }

}  // namespace
}  // namespace birkhoff
