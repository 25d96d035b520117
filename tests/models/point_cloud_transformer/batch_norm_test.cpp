// Batch norm over ranks against one rank with all rows, and against LibTorch's.
//
// Legend: R rows, C channels.
#include "models/point_cloud_transformer/batch_norm.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "data/batch/partition.h"
#include "tests/cluster/base/thread_group.h"
#include "tests/models/point_cloud_transformer/point_clouds.h"

namespace birkhoff {
namespace {

constexpr std::int64_t kColumns = 5;
constexpr double kEps = 1e-5, kMomentum = 0.1;

// What a rank knows after a forward and a backward pass of the loss sum_rc k_rc y_rc^3.
struct Results {
  at::Tensor y_RC, d_x_RC, d_weight_C, d_bias_C, statistic_sums_2C;
};

Results run(const at::Tensor& x_RC, const at::Tensor& k_RC, ProcessGroup* group) {
  Parameters parameters(1, at::kDouble, at::kDouble, ModelPlacement(at::kCPU, nullptr, group));
  const BatchNorm norm(kColumns, kEps, kMomentum, "norm", parameters);
  set_values(parameters);
  const at::Tensor leaf = x_RC.detach().clone().set_requires_grad(true);
  NamedSums sums;
  const at::Tensor y_RC = norm(leaf, /*training=*/true, sums);
  (k_RC * y_RC.pow(3)).sum().backward();
  EXPECT_EQ(sums.size(), 1u);
  EXPECT_EQ(sums[0].first, parameters.statistics()[0].name);
  return {y_RC.detach(), leaf.grad(), parameters.list()[0].value.grad(),
          parameters.list()[1].value.grad(), sums[0].second};
}

// Rows far from the origin, with another mean on each rank.
at::Tensor rows_of(std::int64_t R) {
  return values_of({R, kColumns}, 4) + at::arange(R, at::kDouble).unsqueeze(1) * 0.3 + 50;
}

TEST(BatchNorm, OnRanksIsThatOfOneRankWithAllRows) {
  for (const int ranks : {2, 4}) {
    for (const std::int64_t R : {std::int64_t{4}, std::int64_t{23}}) {
      const at::Tensor x_RC = rows_of(R), k_RC = values_of({R, kColumns}, 9);
      const Results expected = run(x_RC, k_RC, nullptr);
      at::Tensor d_weight_C = at::zeros({kColumns}, at::kDouble),
                 d_bias_C = at::zeros({kColumns}, at::kDouble),
                 sums_2C = at::zeros({2, kColumns}, at::kDouble);
      std::mutex adding;
      run_ranks(ranks, [&](ProcessGroup& group) {
        const Interval mine = partition(R, group.rank(), ranks);  // of unequal sizes
        const auto part = [&](const at::Tensor& all) { return all.slice(0, mine.begin, mine.end); };
        const Results results = run(part(x_RC), part(k_RC), &group);
        EXPECT_LT(most_different(results.y_RC, part(expected.y_RC)), 1e-11);
        EXPECT_LT(most_different(results.d_x_RC, part(expected.d_x_RC)), 1e-10);
        const std::lock_guard lock(adding);
        d_weight_C += results.d_weight_C;
        d_bias_C += results.d_bias_C;
        sums_2C += results.statistic_sums_2C;
      });
      EXPECT_LT(most_different(d_weight_C, expected.d_weight_C), 1e-10) << ranks;
      EXPECT_LT(most_different(d_bias_C, expected.d_bias_C), 1e-10) << ranks;
      EXPECT_LT(most_different(sums_2C, expected.statistic_sums_2C), 1e-10) << ranks;
    }
  }
}

TEST(BatchNorm, IsThatOfLibTorch) {
  Parameters parameters(1, at::kDouble);
  const BatchNorm norm(kColumns, kEps, kMomentum, "norm", parameters);
  set_values(parameters);
  const at::Tensor x_RC = rows_of(11), k_RC = values_of({11, kColumns}, 9);
  const Results ours = run(x_RC, k_RC, nullptr);
  const at::Tensor leaf = x_RC.clone().set_requires_grad(true),
                   weight = parameters.list()[0].value.detach().clone().set_requires_grad(true),
                   bias = parameters.list()[1].value.detach().clone().set_requires_grad(true),
                   mean = at::zeros({kColumns}, at::kDouble),
                   variance = at::ones({kColumns}, at::kDouble);
  const at::Tensor y_RC = at::batch_norm(leaf, weight, bias, mean, variance, /*training=*/true,
                                         kMomentum, kEps, /*cudnn_enabled=*/false);
  (k_RC * y_RC.pow(3)).sum().backward();
  EXPECT_LT(most_different(ours.y_RC, y_RC), 1e-11);
  EXPECT_LT(most_different(ours.d_x_RC, leaf.grad()), 1e-10);
  EXPECT_LT(most_different(ours.d_weight_C, weight.grad()), 1e-10);
  EXPECT_LT(most_different(ours.d_bias_C, bias.grad()), 1e-10);
  // A step's update of the running statistics, and an evaluation with them.
  const Statistic& running = parameters.statistics().at(0);
  running.value.copy_(running.update(running.value, ours.statistic_sums_2C));
  EXPECT_LT(most_different(running.value[0], mean), 1e-12);
  EXPECT_LT(most_different(running.value[1], variance), 1e-12);
  NamedSums none;
  EXPECT_LT(most_different(norm(x_RC, /*training=*/false, none),
                           at::batch_norm(x_RC, weight, bias, mean, variance, /*training=*/false,
                                          kMomentum, kEps, /*cudnn_enabled=*/false)),
            1e-11);
  EXPECT_TRUE(none.empty());
  EXPECT_THAT(running.describe(running.value), testing::HasSubstr("running means"));
}

// In fp32, around 10,000 with a standard deviation of about 0.7: x^2 is rounded to multiples of 8,
// so a variance from sums of squares would be wrong in its first digit.
TEST(BatchNorm, DoesNotCancelFarFromTheOrigin) {
  run_ranks(2, [&](ProcessGroup& group) {
    const at::Tensor all_RC = (values_of({400, kColumns}, 2) + 10000).to(at::kFloat),
                     mine_RC = all_RC.slice(0, 150 * group.rank(), 150 + 250 * group.rank());
    const auto [normal_RC, mean_variance_2C] = normalize_over_batch(mine_RC, kEps, &group);
    const at::Tensor exact_RC = all_RC.to(at::kDouble), mean_C = exact_RC.mean(0),
                     variance_C = (exact_RC - mean_C).square().sum(0) / 399;
    // A sum of 250 values of 10,000 in fp32 may lose 2^-24 of it at each of its log2(250) levels,
    // which moves the mean by less than 0.005, and the variance by the square of that.
    EXPECT_LT(most_different(mean_variance_2C[0], mean_C), 0.005);
    EXPECT_LT(most_different(mean_variance_2C[1] / variance_C, at::ones({kColumns}, at::kDouble)),
              1e-4);
    EXPECT_TRUE(normal_RC.isfinite().all().item<bool>());
  });
}

// A channel of equal values, and a single row.
TEST(BatchNorm, ConstantChannelsAreZero) {
  for (const std::int64_t R : {1, 7}) {
    const auto [normal_RC, mean_variance_2C] =
        normalize_over_batch(at::full({R, kColumns}, 3.0, at::kDouble), kEps, nullptr);
    EXPECT_EQ(normal_RC.abs().max().item<double>(), 0);
    EXPECT_EQ(mean_variance_2C[0].min().item<double>(), 3);
    EXPECT_EQ(mean_variance_2C[1].max().item<double>(), 0);
  }
}

}  // namespace
}  // namespace birkhoff
