// A mechanism for tests, with everything that a mechanism can return to training: a statistic, an
// auxiliary loss, and a figure. Values are weighted by how well the query fits the running mean of
// all keys of the past steps.
#pragma once

#include <ATen/ATen.h>

#include <string>

#include "attention/mechanism.h"

namespace birkhoff::test {

class RunningMean : public Mechanism {
 public:
  RunningMean(const MechanismShape& shape, const std::string& prefix, Parameters& parameters)
      : mean_HD_(parameters.add_statistic(prefix + ".mean", {shape.heads, shape.head_dim},
                                          Initializer::normal(0.3),
                                          {shape.heads, shape.head_dim + 1}, next_mean)) {}

  AttentionOutput attend(const AttentionInput& in, Path) const override {
    const at::Tensor mean_H1D = mean_HD_.unsqueeze(1);
    const at::Tensor fit_BHL1 = (in.q_BHLD * mean_H1D).sum(-1, /*keepdim=*/true).tanh();
    const at::Tensor squares_B = (in.k_BHSD - mean_H1D).square().sum(at::IntArrayRef({1, 2, 3}));
    AttentionOutput output{in.v_BHSD * fit_BHL1, {}};
    output.sums = {{"auxiliary_loss", 0.01 * squares_B},
                   {"square_distance", squares_B.detach().sum()},
                   {"keys", at::full({}, in.k_BHSD.size(0) * in.k_BHSD.size(2),
                                     in.k_BHSD.options().requires_grad(false))}};
    if (in.noise) {
      const at::Tensor ones = at::ones_like(in.k_BHSD.detach().narrow(-1, 0, 1));
      output.sums.emplace_back(
          "mean", at::cat({in.k_BHSD.detach(), ones}, -1).sum(at::IntArrayRef({0, 2})));
    }
    return output;
  }

  MechanismTraits traits() const override {
    MechanismTraits traits{.causal = true};
    traits.figures = {{"auxiliary_loss", ""}, {"square_distance", "keys"}};
    return traits;
  }
  at::Tensor visible_keys(std::int64_t num_queries, std::int64_t num_keys) const override {
    return at::eye(num_queries, num_keys, at::kBool);
  }
  double forward_flops(std::int64_t) const override { return 0; }

  // The statistic's rule. sums: the keys' sum, then their number.
  static at::Tensor next_mean(const at::Tensor& mean_HD, const at::Tensor& sums) {
    const std::int64_t head_dim = mean_HD.size(1);
    const at::Tensor number_H1 = sums.narrow(1, head_dim, 1);
    return 0.9 * mean_HD + 0.1 * sums.narrow(1, 0, head_dim) / number_H1.clamp_min(1);
  }

 private:
  at::Tensor mean_HD_;
};

}  // namespace birkhoff::test
