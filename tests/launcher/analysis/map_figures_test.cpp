// Figures of attention maps, on maps whose figures are known.
#include "launcher/analysis/map_figures.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "launcher/analysis/analysis_page.h"

namespace birkhoff {
namespace {

TEST(MapFigures, AUniformMapHasTheLargestEntropy) {
  const at::Tensor uniform = at::full({3, 4}, 0.25);
  EXPECT_NEAR(mean_entropy(uniform), std::log(4), 1e-12);
  EXPECT_NEAR(mean_reach(uniform), (6. / 4 + 4. / 4 + 4. / 4) / 3, 1e-12);
  EXPECT_NEAR(balance_errors(uniform).rows, 0, 1e-12);
  EXPECT_NEAR(balance_errors(uniform).columns, 0.25, 1e-12);
}

TEST(MapFigures, APermutationIsBalancedAndSure) {
  const at::Tensor reversed = at::eye(4).flip(1);
  EXPECT_NEAR(mean_entropy(reversed), 0, 1e-12);
  EXPECT_NEAR(mean_reach(reversed), 2, 1e-12);
  EXPECT_EQ(balance_errors(reversed).rows, 0);
  EXPECT_EQ(balance_errors(reversed).columns, 0);
}

TEST(MapFigures, QueriesWithoutKeysDoNotCount) {
  const at::Tensor map = at::zeros({3, 3});
  map[1][2] = 2;  // an output that adds two means
  EXPECT_NEAR(mean_entropy(map), 0, 1e-12);
  EXPECT_NEAR(mean_reach(map), 1, 1e-12);
  EXPECT_NEAR(balance_errors(map).rows, 1, 1e-12);
  EXPECT_TRUE(std::isnan(mean_entropy(at::zeros({3, 3}))));
}

TEST(MapFigures, TheDivergenceIs0ForEqualAndLog2ForDisjointWeights) {
  const at::Tensor own = at::eye(4), next = at::roll(own, 1, 1);
  EXPECT_NEAR(mean_divergence(own, own), 0, 1e-12);
  EXPECT_NEAR(mean_divergence(own, next), std::log(2), 1e-12);
  EXPECT_NEAR(mean_divergence(own * 2, own), 0, 1e-12);  // of distributions
  // Half of the weight in common.
  const at::Tensor both = (own + next) / 2;
  const double expected =
      0.25 * std::log(0.5 / 0.75) + 0.25 * std::log(0.5 / 0.25) + 0.5 * std::log(1 / 0.75);
  EXPECT_NEAR(mean_divergence(both, own), expected, 1e-12);
  EXPECT_NEAR(mean_divergence(own, both), expected, 1e-12);
  EXPECT_TRUE(std::isnan(mean_divergence(own, at::zeros({4, 4}))));
}

TEST(MapFigures, EqualRowsHaveRankOne) {
  const at::Tensor equal = at::ones({5, 1}) * at::arange(1, 4, at::kDouble);
  EXPECT_NEAR(distance_to_rank_one(equal), 0, 1e-12);
  // Rows 1 and -1: the mean is 0.
  EXPECT_NEAR(distance_to_rank_one(at::stack({at::ones({3}), -at::ones({3})})), 1, 1e-12);
  const at::Tensor x = at::tensor({1., 3.}).unsqueeze(1);  // less their mean: -1 and 1
  EXPECT_NEAR(distance_to_rank_one(x), std::sqrt(2. * 1) / std::sqrt(4. * 3), 1e-12);
}

AnalyzedRun run_with(std::vector<Divergences> layers) {
  AnalyzedRun run{.name = "run", .step = 1, .tokens = {}, .analysis = {}};
  for (Divergences& divergences : layers) {
    run.analysis.layers.emplace_back().divergences = std::move(divergences);
  }
  return run;
}

TEST(DivergenceTable, HasMeansAndDeviationsOfRuns) {
  const KindPair local{"block_local", "block_local"}, mixed{"block_local", "routing"};
  const DivergenceTable table =
      divergence_table({run_with({{{local, 0.1}, {mixed, 0.6}}, {{mixed, 0.4}}}),
                        run_with({{{local, 0.3}, {mixed, 0.6}}, {{mixed, 0.2}}})});
  ASSERT_EQ(table.pairs, (std::vector<KindPair>{local, mixed}));
  EXPECT_EQ(table.layers[0][0].text(), "0.2000 ± 0.1414");
  EXPECT_EQ(table.layers[0][1].text(), "0.6000 ± 0.0000");
  EXPECT_EQ(table.layers[1][0].text(), "-");
  EXPECT_EQ(table.layers[1][1].text(), "0.3000 ± 0.1414");
  EXPECT_EQ(table.all[1].text(), "0.4500 ± 0.0707");  // of the means 0.5 and 0.4
  EXPECT_EQ(divergence_table({run_with({{{local, 0.1}}})}).all[0].text(), "0.1000");
}

}  // namespace
}  // namespace birkhoff
