// bf16 and fp16 computation over fp32 parameters.
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include "model_fixture.h"

namespace birkhoff {
namespace {

constexpr const char* kMechanisms[] = {
    "dense {}",
    "block_local { block: 4 look_back: 1 }",
    "sinkhorn { block: 4 }",
    "sinkhorn { block: 4 causal_balance: cumulative sort_net: attention }",
    "sinkhorn { block: 4 causal_balance: none tie_key_value: true combine: add_outputs }",
    "sinkhorn_mixture { sinkhorn { block: 4 combine: add_logits } }"};

std::string model_text(const std::string& mechanism, const std::string& norm = "pre") {
  return "norm: " + norm + " bias: true attention { group { mechanism { " + mechanism + " } } }";
}

// `precision`: its name. The tolerances bound the rounding errors of the loss and the gradients.
void check_against_fp64(const char* precision, double loss_tolerance, double gradient_tolerance,
                        const std::string& norm = "pre") {
  const Batch batch = make_batch(4, 16);
  for (const char* const mechanism : kMechanisms) {
    const auto run = [&](const std::string& chosen) {
      const TestModel model =
          make_test_model(model_text(mechanism, norm), {"train.precision=" + chosen});
      const LossSums sums = model->loss_sums(batch, make_noise(batch));
      EXPECT_EQ(sums.nats.scalar_type(), at::kDouble);
      sums.loss.backward();
      std::vector<at::Tensor> gradients;
      for (const Parameter& parameter : model->parameters().list()) {
        EXPECT_EQ(parameter.value.scalar_type(), parameter.value.grad().scalar_type());
        EXPECT_EQ(parameter.value.scalar_type() == at::kDouble, chosen == "fp64");
        gradients.push_back(parameter.value.grad().to(at::kDouble));
      }
      return std::pair(sums.nats.item<double>(), gradients);
    };
    const auto [exact_loss, exact] = run("fp64");
    const auto [loss, gradients] = run(precision);
    EXPECT_NE(loss, exact_loss) << mechanism;
    EXPECT_NEAR(loss, exact_loss, loss_tolerance * exact_loss) << mechanism;
    for (std::size_t i = 0; i < exact.size(); ++i) {
      const double error = (gradients[i] - exact[i]).norm().item<double>();
      EXPECT_LE(error, gradient_tolerance * exact[i].norm().item<double>() + 1e-6)
          << mechanism << " " << i << " of norm " << exact[i].norm().item<double>();
    }
  }
}

TEST(Bf16, LossAndGradientsAreThoseOfFp64UpToBf16) { check_against_fp64("bf16", 0x1p-8, 0.03); }

TEST(Bf16, PostNormLayersKeepTheirStreamInFp32) {
  check_against_fp64("bf16", 0x1p-8, 0.03, "post");
}

TEST(Fp16, LossAndGradientsAreThoseOfFp64UpToFp16) { check_against_fp64("fp16", 0x1p-11, 0.004); }

TEST(Bf16, DecodesWhatItComputesInOnePassAndTellsFp32Logits) {
  const Batch batch = make_batch(2, 16);
  for (const char* const mechanism : kMechanisms) {
    const TestModel model = make_test_model(model_text(mechanism), {"train.precision=bf16"});
    enlarge_parameters(*model.model);
    const at::NoGradGuard no_gradients;
    const at::Tensor logits_BTV = model->logits(batch, {});
    EXPECT_EQ(logits_BTV.scalar_type(), at::kFloat);
    const auto cache = model->decode_cache(2);
    for (std::int64_t t = 0; t < 16; ++t) {
      const at::Tensor step_BV =
          model->decode_step(*cache, batch.at(field::kInputs).select(1, t).contiguous());
      EXPECT_EQ(step_BV.scalar_type(), at::kFloat);
      EXPECT_LE(greatest_difference(step_BV, logits_BTV.select(1, t)),
                0.05 * logits_BTV.abs().max().item<double>())
          << mechanism << " " << t;
    }
  }
}

// Small updates are not lost: they change the fp32 parameters, whose rounded values the layers see.
TEST(Bf16, ParametersKeepWhatBf16CannotShow) {
  const Batch batch = make_batch(2, 16);
  const TestModel model = make_test_model("", {"train.precision=bf16"});
  const at::NoGradGuard no_gradients;
  const at::Tensor weight = parameter_of(*model.model, "blocks.0.feed_forward.up.weight");
  const at::Tensor before = model->logits(batch, {});
  const at::Tensor rounded = weight.to(at::kBFloat16).to(at::kFloat);
  weight.detach().copy_(rounded * (1 + 0x1p-12f));
  EXPECT_TRUE(at::equal(model->logits(batch, {}), before));
  EXPECT_FALSE(at::equal(weight, rounded));
  weight.detach().mul_(1 + 0x1p-7f);
  EXPECT_FALSE(at::equal(model->logits(batch, {}), before));
}

}  // namespace
}  // namespace birkhoff
