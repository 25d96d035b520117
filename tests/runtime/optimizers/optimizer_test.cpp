#include "runtime/optimizers/optimizer.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <map>

#include "configs/schema/config.pb.h"
#include "tests/cluster/base/thread_group.h"
#include "tests/runtime/optimizers/gradient_norm.h"
#include "tests/runtime/toy_model.h"

namespace birkhoff {
namespace {

using test::gradient_norm;
using Values = std::vector<double>;

// A model with any parameters, for optimizers that never run it.
Parameters some_parameters(at::ScalarType dtype) {
  Parameters parameters(5, dtype);
  parameters.add("matrix", {6, 9}, Initializer::normal(0.3), true);
  parameters.add("bias", {9}, Initializer::normal(0.2), false);
  parameters.add("stack", {2, 3, 4}, Initializer::normal(1e-5), true);
  parameters.add("gain", {1}, Initializer::ones(), false);
  return parameters;
}

// A gradient that varies with step, parameter and element, over several orders of magnitude.
double gradient_value(int step, std::size_t parameter, std::int64_t element) {
  return std::sin(1.7 * step + 3.1 * static_cast<double>(parameter) +
                  0.9 * static_cast<double>(element)) *
         std::pow(10.0, static_cast<double>(element % 5) - 3);
}

void set_gradients(const Parameters& parameters, int step) {
  for (std::size_t p = 0; p < parameters.list().size(); ++p) {
    at::Tensor gradient = parameters.list()[p].value.grad().view({-1});
    for (std::int64_t i = 0; i < gradient.numel(); ++i)
      gradient[i].fill_(gradient_value(step, p, i));
  }
}

Values to_values(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.detach().to(at::kDouble).contiguous().view({-1});
  return Values(flat.data_ptr<double>(), flat.data_ptr<double>() + flat.numel());
}

StepScalars scalars_of(double rate, double scale, bool apply = true) {
  StepScalars scalars;
  scalars.set(StepScalars::kLearningRate, rate);
  scalars.set(StepScalars::kGradientScale, scale);
  scalars.set(StepScalars::kApply, apply ? 1 : 0);
  return scalars;
}

configs::Optimizer adamw_config() {
  configs::Optimizer config;
  config.mutable_adamw()->set_beta1(0.875f);  // exact in binary
  config.mutable_adamw()->set_beta2(0.96875f);
  config.mutable_adamw()->set_epsilon(0.0009765625f);
  config.mutable_adamw()->set_weight_decay(0.125f);
  return config;
}

double rate_at(int step) { return 0.01 / step; }
constexpr double kScale = 0.5;

void expect_near(const at::Tensor& actual, const Values& expected, double relative,
                 const std::string& what) {
  const Values values = to_values(actual);
  ASSERT_EQ(values.size(), expected.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    EXPECT_NEAR(values[i], expected[i], relative * (std::abs(expected[i]) + 1e-3))
        << what << " element " << i;
  }
}

// torch.optim.AdamW, one element at a time (its documentation's algorithm).
void reference_adamw(Values& p, Values& m, Values& v, std::size_t parameter, int t, double decay) {
  for (std::size_t i = 0; i < p.size(); ++i) {
    const double g = kScale * gradient_value(t, parameter, static_cast<std::int64_t>(i));
    p[i] -= rate_at(t) * decay * p[i];
    m[i] = 0.875 * m[i] + (1 - 0.875) * g;
    v[i] = 0.96875 * v[i] + (1 - 0.96875) * g * g;
    const double m_hat = m[i] / (1 - std::pow(0.875, t));
    const double v_hat = v[i] / (1 - std::pow(0.96875, t));
    p[i] -= rate_at(t) * m_hat / (std::sqrt(v_hat) + 0.0009765625);
  }
}

TEST(AdamW, FollowsTheFormulaInBothPrecisions) {
  for (const auto& [dtype, tolerance] :
       {std::pair(at::kDouble, 1e-13), std::pair(at::kFloat, 2e-6)}) {
    Parameters parameters = some_parameters(dtype);
    const auto group = make_single_group();
    GradBuckets buckets(parameters, *group, 60);
    const auto optimizer = make_optimizer(adamw_config(), buckets);
    for (std::size_t p = 0; p < parameters.list().size(); ++p) {
      ASSERT_EQ(parameters.list()[p].value.scalar_type(), dtype);
    }
    std::vector<Values> value, m, v;
    for (const auto& parameter : parameters.list()) {
      value.push_back(to_values(parameter.value));
      m.emplace_back(value.back().size(), 0.0);
      v.emplace_back(value.back().size(), 0.0);
    }
    for (int t = 1; t <= 7; ++t) {
      set_gradients(parameters, t);
      optimizer->step(scalars_of(rate_at(t), kScale));
      for (std::size_t p = 0; p < value.size(); ++p) {
        const Parameter& parameter = parameters.list()[p];
        reference_adamw(value[p], m[p], v[p], p, t, parameter.decay ? 0.125 : 0.0);
        expect_near(parameter.value, value[p], tolerance, parameter.name);
      }
    }
  }
}

configs::Optimizer sgd_config(bool nesterov) {
  configs::Optimizer config;
  config.mutable_sgd()->set_momentum(0.875f);
  config.mutable_sgd()->set_weight_decay(0.125f);
  config.mutable_sgd()->set_nesterov(nesterov);
  return config;
}

// Three steps of one element, by hand: momentum 1/2, weight decay 1/4, rate 1/8, mean gradients 1,
// 1/2 and -1, from 2 on. All values are exact in binary.
TEST(Sgd, TakesTheStepsThatWereComputedByHand) {
  constexpr double kGradients[3] = {1, 0.5, -1};
  // g': 1.5, 0.953125, -0.60009765625; v: 1.5, 1.703125, 0.25146484375. With nesterov
  // g': 1.5, 0.9296875, -0.6256103515625; v: 1.5, 1.6796875, 0.2142333984375.
  constexpr double kMatrix[2][3] = {{1.8125, 1.599609375, 1.56817626953125},
                                    {1.71875, 1.49755859375, 1.56237030029296875}};
  // Without decay v is 1, 1, -0.5, and g' + v / 2 is 1.5, 1, -1.25.
  constexpr double kBias[2][3] = {{1.875, 1.75, 1.8125}, {1.8125, 1.6875, 1.84375}};
  for (const bool nesterov : {false, true}) {
    Parameters parameters(1, at::kDouble);
    const at::Tensor matrix = parameters.add("matrix", {1, 1}, Initializer::ones(), true),
                     bias = parameters.add("bias", {1}, Initializer::ones(), false);
    const auto group = make_single_group();
    GradBuckets buckets(parameters, *group, 60);
    configs::Optimizer config;
    config.mutable_sgd()->set_momentum(0.5f);
    config.mutable_sgd()->set_weight_decay(0.25f);
    config.mutable_sgd()->set_nesterov(nesterov);
    const auto optimizer = make_optimizer(config, buckets);
    for (const at::Tensor& each : {matrix, bias}) each.detach().fill_(2);
    for (int t = 0; t < 3; ++t) {
      for (const at::Tensor& each : {matrix, bias}) each.mutable_grad().fill_(4 * kGradients[t]);
      optimizer->step(scalars_of(0.125, 0.25));
      EXPECT_EQ(matrix.item<double>(), kMatrix[nesterov][t]) << t;
      EXPECT_EQ(bias.item<double>(), kBias[nesterov][t]) << t;
    }
  }
}

TEST(Sgd, FollowsPyTorchs) {
  for (const auto& [dtype, tolerance] :
       {std::pair(at::kDouble, 1e-13), std::pair(at::kFloat, 2e-6)}) {
    for (const bool nesterov : {false, true}) {
      Parameters parameters = some_parameters(dtype);
      std::vector<torch::optim::OptimizerParamGroup> groups;
      for (const Parameter& p : parameters.list()) {
        const at::Tensor copy = p.value.detach().to(at::kDouble).clone().set_requires_grad(true);
        copy.mutable_grad() = at::zeros_like(copy.detach());
        groups.emplace_back(
            std::vector{copy},
            std::make_unique<torch::optim::SGDOptions>(
                torch::optim::SGDOptions(0).momentum(0.875).nesterov(nesterov).weight_decay(
                    p.decay ? 0.125 : 0)));
      }
      torch::optim::SGD expected(groups, torch::optim::SGDOptions(0));
      const auto group = make_single_group();
      GradBuckets buckets(parameters, *group, 60);
      const auto optimizer = make_optimizer(sgd_config(nesterov), buckets);
      for (int t = 1; t <= 30; ++t) {
        set_gradients(parameters, t);
        for (std::size_t p = 0; p < parameters.list().size(); ++p) {
          torch::optim::OptimizerParamGroup& of = expected.param_groups()[p];
          of.options().set_lr(rate_at(t));
          at::Tensor gradient = of.params()[0].mutable_grad().view({-1});
          for (std::int64_t i = 0; i < gradient.numel(); ++i) {
            gradient[i].fill_(kScale * gradient_value(t, p, i));
          }
        }
        optimizer->step(scalars_of(rate_at(t), kScale));
        expected.step();
        for (std::size_t p = 0; p < parameters.list().size(); ++p) {
          expect_near(parameters.list()[p].value, to_values(expected.param_groups()[p].params()[0]),
                      tolerance, parameters.list()[p].name);
        }
      }
    }
  }
}

// Shazeer & Stern 2018, algorithms 4 and 5 written as loops; `shape` has one dimension, or at least
// two.
struct ReferenceAdafactor {
  Values p, rows, columns, full;
  std::int64_t num_stacks, num_rows, num_columns;  // num_rows 0: a vector

  ReferenceAdafactor(const at::Tensor& value) : p(to_values(value)) {
    const auto shape = value.sizes();
    const bool vector = shape.size() < 2;
    num_rows = vector ? 0 : shape[shape.size() - 2];
    num_columns = shape[shape.size() - 1];
    num_stacks = vector ? 1 : value.numel() / (num_rows * num_columns);
    rows.assign(num_stacks * num_rows, 0);
    columns.assign(num_stacks * num_columns, 0);
    full.assign(vector ? p.size() : 0, 0);
  }

  static double rms(const Values& x) {
    double sum = 0;
    for (const double value : x) sum += value * value;
    return std::sqrt(sum / static_cast<double>(x.size()));
  }

  void step(std::size_t parameter, int t) {
    const double beta = 1 - std::pow(t, -0.75);
    Values g(p.size()), u(p.size());
    for (std::size_t i = 0; i < p.size(); ++i)
      g[i] = kScale * gradient_value(t, parameter, static_cast<std::int64_t>(i));
    if (num_rows == 0) {
      for (std::size_t i = 0; i < p.size(); ++i) {
        full[i] = beta * full[i] + (1 - beta) * (g[i] * g[i] + 1e-30);
        u[i] = g[i] / std::sqrt(full[i]);
      }
    } else {
      for (std::int64_t s = 0; s < num_stacks; ++s) {
        const auto at = [&](std::int64_t r, std::int64_t c) {
          return (s * num_rows + r) * num_columns + c;
        };
        double row_mean = 0;
        for (std::int64_t r = 0; r < num_rows; ++r) {
          double mean = 0;
          for (std::int64_t c = 0; c < num_columns; ++c)
            mean += (g[at(r, c)] * g[at(r, c)] + 1e-30) / num_columns;
          double& row = rows[s * num_rows + r];
          row = beta * row + (1 - beta) * mean;
          row_mean += row / num_rows;
        }
        for (std::int64_t c = 0; c < num_columns; ++c) {
          double mean = 0;
          for (std::int64_t r = 0; r < num_rows; ++r)
            mean += (g[at(r, c)] * g[at(r, c)] + 1e-30) / num_rows;
          double& column = columns[s * num_columns + c];
          column = beta * column + (1 - beta) * mean;
        }
        for (std::int64_t r = 0; r < num_rows; ++r) {
          for (std::int64_t c = 0; c < num_columns; ++c) {
            // V = R C / mean(R)
            const double second_moment =
                rows[s * num_rows + r] * columns[s * num_columns + c] / row_mean;
            u[at(r, c)] = g[at(r, c)] / std::sqrt(second_moment);
          }
        }
      }
    }
    const double scale = rate_at(t) * std::max(0.0009765625, rms(p)) / std::max(1.0, rms(u) / 0.5);
    for (std::size_t i = 0; i < p.size(); ++i) p[i] -= scale * u[i];
  }
};

configs::Optimizer adafactor_config() {
  configs::Optimizer config;
  config.mutable_adafactor()->set_decay_exponent(0.75f);
  config.mutable_adafactor()->set_clip_update(0.5f);
  config.mutable_adafactor()->set_epsilon2(0.0009765625f);
  return config;
}

TEST(Adafactor, FollowsTheFormulaInBothPrecisions) {
  for (const auto& [dtype, tolerance] :
       {std::pair(at::kDouble, 1e-12), std::pair(at::kFloat, 3e-6)}) {
    Parameters parameters = some_parameters(dtype);
    const auto group = make_single_group();
    GradBuckets buckets(parameters, *group, 60);
    const auto optimizer = make_optimizer(adafactor_config(), buckets);
    std::vector<ReferenceAdafactor> references;
    for (const auto& parameter : parameters.list()) references.emplace_back(parameter.value);
    for (int t = 1; t <= 7; ++t) {
      set_gradients(parameters, t);
      optimizer->step(scalars_of(rate_at(t), kScale));
      for (std::size_t p = 0; p < references.size(); ++p) {
        references[p].step(p, t);
        expect_near(parameters.list()[p].value, references[p].p, tolerance,
                    parameters.list()[p].name);
      }
    }
  }
}

class EveryOptimizer : public testing::TestWithParam<const char*> {
 protected:
  configs::Optimizer config() const {
    const std::string name = GetParam();
    return name == "adamw"       ? adamw_config()
           : name == "adafactor" ? adafactor_config()
                                 : sgd_config(name == "nesterov");
  }
};
INSTANTIATE_TEST_SUITE_P(All, EveryOptimizer,
                         testing::Values("adamw", "adafactor", "sgd", "nesterov"));

// Everything that may change in a step, in one list.
std::vector<at::Tensor> snapshot(const Parameters& parameters, Optimizer& optimizer) {
  std::vector<at::Tensor> all;
  for (const auto& parameter : parameters.list()) all.push_back(parameter.value.detach().clone());
  for (const auto& part : optimizer.state()) all.push_back(part.data.clone());
  return all;
}

TEST_P(EveryOptimizer, ASkippedStepLeavesNoTrace) {
  Parameters parameters = some_parameters(at::kFloat);
  const auto group = make_single_group();
  GradBuckets buckets(parameters, *group, 60);
  const auto optimizer = make_optimizer(config(), buckets);
  set_gradients(parameters, 1);
  optimizer->step(scalars_of(0.01, 1));
  const auto before = snapshot(parameters, *optimizer);
  buckets.buckets()[0].gradients.fill_(std::numeric_limits<float>::quiet_NaN());
  optimizer->step(scalars_of(0.01, std::nan(""), false));
  const auto after = snapshot(parameters, *optimizer);
  for (std::size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(at::equal(before[i], after[i])) << i;
}

TEST_P(EveryOptimizer, StateCoversEveryElementOnceAndResumesExactly) {
  for (const int size : {1, 2, 3}) {
    run_ranks(size, [&](ProcessGroup& group) {
      Parameters parameters = some_parameters(at::kFloat), copy = some_parameters(at::kFloat);
      GradBuckets buckets(parameters, group, 60), copy_buckets(copy, group, 60);
      const auto optimizer = make_optimizer(config(), buckets),
                 other = make_optimizer(config(), copy_buckets);
      for (int t = 1; t <= 3; ++t) {
        set_gradients(parameters, t);
        optimizer->step(scalars_of(rate_at(t), kScale));
      }
      // Parts of a name tile it without gaps, and each owner is a rank of the group.
      std::map<std::string, std::int64_t> covered;
      auto parts = optimizer->state(), others = other->state();
      ASSERT_EQ(parts.size(), others.size());
      for (std::size_t i = 0; i < parts.size(); ++i) {
        const TensorPart& part = parts[i];
        EXPECT_EQ(part.region.flat_begin, covered[part.name]) << part.name;
        EXPECT_EQ(part.data.numel(), part.region.flat_end - part.region.flat_begin);
        EXPECT_TRUE(part.data.is_contiguous());
        EXPECT_GE(part.owner, 0);
        EXPECT_LT(part.owner, size);
        covered[part.name] = part.region.flat_end;
        others[i].data.copy_(part.data);  // what loading a checkpoint does
      }
      for (const TensorPart& part : parts) {
        EXPECT_EQ(covered[part.name], c10::multiply_integers(part.region.global_shape))
            << part.name;
      }
      for (std::size_t p = 0; p < copy.list().size(); ++p) {
        copy.list()[p].value.detach().copy_(parameters.list()[p].value.detach());
      }
      for (Parameters* each : {&parameters, &copy}) set_gradients(*each, 4);
      optimizer->step(scalars_of(rate_at(4), kScale));
      other->step(scalars_of(rate_at(4), kScale));
      const auto a = snapshot(parameters, *optimizer), b = snapshot(copy, *other);
      for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << i;
    });
  }
}

TEST_P(EveryOptimizer, BitsDoNotDependOnThreads) {
  std::vector<at::Tensor> results;
  for (const int threads : {1, 2, 3}) {
    at::set_num_threads(threads);
    Parameters parameters(1, at::kFloat);
    const at::Tensor vector = parameters.add("vector", {100003}, Initializer::normal(1), true);
    const at::Tensor matrix = parameters.add("matrix", {301, 517}, Initializer::normal(1), true);
    const auto group = make_single_group();
    GradBuckets buckets(parameters, *group, 1 << 20);
    const auto optimizer = make_optimizer(config(), buckets);
    buckets.buckets()[0].gradients.copy_(buckets.buckets()[0].values * 0.37);
    for (int t = 1; t <= 3; ++t) optimizer->step(scalars_of(0.1, 1));
    results.push_back(at::cat({vector.detach().flatten(), matrix.detach().flatten()}));
  }
  at::set_num_threads(1);
  EXPECT_TRUE(at::equal(results[0], results[1]));
  EXPECT_TRUE(at::equal(results[0], results[2]));
}

TEST(GradientNorm, IsExactAndIndependentOfThreadsAndPadding) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    Parameters parameters(1, dtype);
    parameters.add("a", {3}, Initializer::zeros(), false);
    const at::Tensor b = parameters.add("b", {70001}, Initializer::zeros(), false);
    const auto group = make_single_group();
    GradBuckets buckets(parameters, *group, 10);
    EXPECT_EQ(gradient_norm(buckets), 0);
    parameters.list()[0].value.grad().fill_(2);
    b.grad().fill_(-3);
    EXPECT_EQ(gradient_norm(buckets), std::sqrt(3.0 * 4 + 70001.0 * 9));
    b.grad().copy_(at::arange(70001, dtype).sin());
    std::vector<double> norms;
    for (const int threads : {1, 2, 3}) {
      at::set_num_threads(threads);
      norms.push_back(gradient_norm(buckets));
    }
    at::set_num_threads(1);
    EXPECT_EQ(norms[0], norms[1]);
    EXPECT_EQ(norms[0], norms[2]);
    EXPECT_NEAR(norms[0], std::sqrt(12 + b.grad().to(at::kDouble).square().sum().item<double>()),
                1e-9);
    b.grad()[70000].fill_(std::numeric_limits<double>::infinity());
    EXPECT_FALSE(std::isfinite(gradient_norm(buckets)));
  }
}

}  // namespace
}  // namespace birkhoff
