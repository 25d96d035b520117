// Recomputed activations: the same bits in outputs and gradients, and the hooks of each parameter
// run once.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "model_fixture.h"
#include "models/transformer/recompute.h"

namespace birkhoff {
namespace {

// Every source of randomness, and all mechanisms.
constexpr const char* kModel = R"(
    bias: true
    attention {
      group { heads: 1 mechanism { dense { dropout: 0.2 } } }
      group { mechanism { sinkhorn { block: 4 gumbel_noise: true dropout: 0.2 } } }
    }
    attention {
      group { heads: 1 mechanism { block_local { block: 4 look_back: 1 } } }
      group { mechanism { sinkhorn_mixture { sinkhorn {
        block: 4 causal_balance: cumulative sort_net: attention } } } }
    }
    attention {
      group { heads: 1 mechanism { routing { clusters: 2 dropout: 0.2 } } }
      group { mechanism { moba { block: 4 top_blocks: 2 dropout: 0.2 } } }
    }
    dropout { embedding: 0.2 residual: 0.3 activation: 0.1 })";

// The gradients in creation order. Adds the hook calls of each accumulator to `calls`.
std::vector<at::Tensor> gradients(const TestModel& model, const Batch& batch,
                                  std::vector<int>* calls, double* loss) {
  class Count : public torch::autograd::FunctionPostHook {
   public:
    explicit Count(int& count) : count_(count) {}
    torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                              const torch::autograd::variable_list&) override {
      ++count_;
      return outputs;
    }

   private:
    int& count_;
  };
  const auto& list = model->parameters().list();
  calls->assign(list.size(), 0);
  std::vector<std::shared_ptr<torch::autograd::Node>> accumulators;
  for (std::size_t i = 0; i < list.size(); ++i) {
    accumulators.push_back(torch::autograd::impl::grad_accumulator(list[i].value));
    accumulators.back()->add_post_hook(std::make_unique<Count>((*calls)[i]));
  }
  // Two micro-batches: the second adds to the gradients of the first.
  for (const auto& [begin, end] : {std::pair{0, 3}, std::pair{3, 4}}) {
    const Batch part = batch.narrow(begin, end);
    const LossSums sums = model->loss_sums(part, make_noise(part));
    *loss += sums.nats.item<double>();
    sums.loss.backward();
  }
  std::vector<at::Tensor> result;
  for (const Parameter& parameter : list) result.push_back(parameter.value.grad());
  return result;
}

TEST(Recompute, GivesTheSameBits) {
  const Batch batch = make_batch(4, 16);
  for (const auto& [precision, norm] :
       {std::pair("fp32", "pre"), std::pair("fp64", "pre"), std::pair("fp32", "post")}) {
    const std::vector<std::string> settings = {std::string("train.precision=") + precision,
                                               std::string("model.norm=") + norm, "model.layers=3"};
    const TestModel plain = make_test_model(kModel, settings);
    std::vector<std::string> with_recompute = settings;
    with_recompute.push_back("train.recompute=true");
    const TestModel recomputing = make_test_model(kModel, with_recompute);
    enlarge_parameters(*plain.model);
    enlarge_parameters(*recomputing.model);
    std::vector<int> calls, recomputing_calls;
    double loss = 0, recomputing_loss = 0;
    const auto expected = gradients(plain, batch, &calls, &loss);
    const auto found = gradients(recomputing, batch, &recomputing_calls, &recomputing_loss);
    EXPECT_EQ(recomputing_loss, loss);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const std::string& name = plain->parameters().list()[i].name;
      EXPECT_TRUE(at::equal(found[i], expected[i])) << name << " " << precision;
      EXPECT_EQ(recomputing_calls[i], 2) << name << ": once a micro-batch";
    }
    EXPECT_EQ(recomputing_calls, calls);
    EXPECT_TRUE(at::equal(recomputing->logits(batch, {}), plain->logits(batch, {})));
  }
}

// A part with several outputs, such as a layer whose mechanism has an auxiliary loss.
TEST(Recompute, TakesGradientsOfEveryOutput) {
  at::Tensor weight = at::full({3}, 0.5, at::kDouble).set_requires_grad(true);
  const at::Tensor x = at::arange(3, at::kDouble).set_requires_grad(true);
  int num_calls = 0;
  const NetworkPart part = [&](const std::vector<at::Tensor>& inputs) {
    ++num_calls;
    return std::vector<at::Tensor>{(inputs[0] * weight).exp(), (weight * weight).sum(),
                                   at::ones({}, at::kDouble)};
  };
  for (const bool second : {false, true}) {  // an output may stay unused
    const auto gradients_of = [&](const std::vector<at::Tensor>& outputs) {
      weight.mutable_grad() = x.mutable_grad() = at::Tensor();
      const at::Tensor loss = outputs[0].sum() + outputs[2];
      (second ? loss + 3 * outputs[1] : loss).backward();
      return std::pair(weight.grad(), x.grad());
    };
    const auto [expected_weight, expected_x] = gradients_of(part({x * 2}));
    num_calls = 0;
    const std::vector<at::Tensor> outputs = recomputed(part, {x * 2});
    EXPECT_EQ(num_calls, 1);
    const auto [found_weight, found_x] = gradients_of(outputs);
    EXPECT_EQ(num_calls, 2);
    EXPECT_TRUE(at::equal(found_weight, expected_weight));
    EXPECT_TRUE(at::equal(found_x, expected_x));
  }
  const at::NoGradGuard no_gradients;
  EXPECT_FALSE(recomputed(part, {x})[0].requires_grad());
}

// A part with several inputs, one of which may be missing, such as the branch of the first layer.
TEST(Recompute, GivesGradientsToEveryInput) {
  const NetworkPart part = [](const std::vector<at::Tensor>& inputs) {
    const at::Tensor sum = inputs[1].defined() ? inputs[0] + 3 * inputs[1] : inputs[0];
    return std::vector<at::Tensor>{sum.exp()};
  };
  for (const bool with_second : {true, false}) {
    const at::Tensor x = at::arange(3, at::kDouble).set_requires_grad(true);
    const at::Tensor y = at::full({3}, 0.5, at::kDouble).set_requires_grad(true);
    const auto gradients_of = [&](const NetworkPart& call) {
      x.mutable_grad() = y.mutable_grad() = at::Tensor();
      call({x * 2, with_second ? y * 2 : at::Tensor()})[0].sum().backward();
      return std::pair(x.grad(), y.grad());
    };
    const auto [expected_x, expected_y] = gradients_of(part);
    const auto [found_x, found_y] = gradients_of(
        [&](const std::vector<at::Tensor>& inputs) { return recomputed(part, inputs); });
    EXPECT_TRUE(at::equal(found_x, expected_x));
    ASSERT_EQ(found_y.defined(), with_second);
    if (with_second) {
      EXPECT_TRUE(at::equal(found_y, expected_y));
    }
  }
}

// Only the inputs are kept between the passes.
TEST(Recompute, KeepsNoActivations) {
  const at::Tensor x = at::ones({4}).set_requires_grad(true);
  c10::weak_intrusive_ptr<c10::TensorImpl, at::UndefinedTensorImpl> activation(x.getIntrusivePtr());
  const NetworkPart part = [&](const std::vector<at::Tensor>& inputs) {
    const at::Tensor inner = inputs[0].exp();
    activation = decltype(activation)(inner.getIntrusivePtr());
    return std::vector<at::Tensor>{inner.sin()};  // autograd keeps `inner`
  };
  const std::vector<at::Tensor> plain = part({x * 2});
  EXPECT_FALSE(activation.expired());
  const std::vector<at::Tensor> outputs = recomputed(part, {x * 2});
  EXPECT_TRUE(activation.expired());
  outputs[0].sum().backward();
}

}  // namespace
}  // namespace birkhoff
