// Queries, keys and values of head groups with and without their own projections.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cluster/base/error.h"
#include "model_fixture.h"
#include "models/transformer/head_projections.h"

namespace birkhoff {
namespace {

constexpr std::int64_t kChannels = 12, kHeadDim = 2, kPlaces = 5;

struct HeadProjectionsTest : ::testing::Test {
  HeadProjections make(KeySource source) {
    return HeadProjections(config, groups, source, {kChannels, kChannels}, "attention", parameters);
  }
  // Outputs [first, first + heads * D) of a linear map, as heads.
  at::Tensor expected(const std::string& name, const at::Tensor& x, std::int64_t first,
                      std::int64_t heads) const {
    for (const Parameter& parameter : parameters.list()) {
      if (parameter.name != name) continue;
      const at::Tensor y = at::matmul(x, parameter.value.t());
      return y.narrow(-1, first, heads * kHeadDim).unflatten(-1, {heads, kHeadDim}).transpose(1, 2);
    }
    ADD_FAILURE() << "no parameter " << name;
    return {};
  }
  std::vector<std::string> shapes() const {
    std::vector<std::string> result;
    for (const Parameter& parameter : parameters.list()) {
      result.push_back(parameter.name + " " + std::to_string(parameter.value.size(0)));
    }
    return result;
  }

  configs::Config resolved = parse_config(
      "task { language_model {} } data { corpus: 'none' } train { precision: fp64 } "
      "model { channels: 12 heads: 6 bias: false }",
      "test", {});
  configs::Model config = resolved.model();
  Parameters parameters{3, at::kDouble};
  at::Tensor x_BTC = at::rand({2, kPlaces, kChannels}, at::kDouble);
  // All projections, tied values, shared queries and keys, one projection for all three.
  std::vector<GroupProjections> groups{
      {.heads = 1, .key_heads = 1},
      {.heads = 2, .key_heads = 2, .has_value = false},
      {.heads = 2, .key_heads = 2, .has_key = false},
      {.heads = 1, .key_heads = 1, .has_key = false, .has_value = false}};
};

TEST_F(HeadProjectionsTest, GroupsGetTheTensorsThatTheyShare) {
  const HeadProjections projections = make(KeySource::kOwnSequence);
  // Heads: 6 of queries, 3 of keys, 3 of values.
  EXPECT_THAT(shapes(), ::testing::ElementsAre("attention.query_key_value.weight 24"));
  EXPECT_EQ(projections.flops(1, 1), 2 * 24 * kChannels);
  const HeadProjections::Heads heads = projections.all(x_BTC, {}).first;
  const auto equal = [&](const at::Tensor& part, std::int64_t first_head, std::int64_t count) {
    return at::allclose(
        part, expected("attention.query_key_value.weight", x_BTC, first_head * kHeadDim, count));
  };
  EXPECT_TRUE(equal(heads.q_BHTD[0], 0, 1) && equal(heads.k_BHTD[0], 6, 1) &&
              equal(heads.v_BHTD[0], 9, 1));
  EXPECT_TRUE(equal(heads.q_BHTD[1], 1, 2) && equal(heads.k_BHTD[1], 7, 2));
  EXPECT_TRUE(heads.v_BHTD[1].is_same(heads.k_BHTD[1]));
  EXPECT_TRUE(equal(heads.q_BHTD[2], 3, 2) && equal(heads.v_BHTD[2], 10, 2));
  EXPECT_TRUE(heads.k_BHTD[2].is_same(heads.q_BHTD[2]));
  EXPECT_TRUE(equal(heads.q_BHTD[3], 5, 1));
  EXPECT_TRUE(heads.k_BHTD[3].is_same(heads.q_BHTD[3]) && heads.v_BHTD[3].is_same(heads.q_BHTD[3]));
}

TEST_F(HeadProjectionsTest, GroupedQueriesHaveFewerKeysAndValues) {
  groups = {{.heads = 4, .key_heads = 2}, {.heads = 2, .key_heads = 1, .has_value = false}};
  const HeadProjections projections = make(KeySource::kOwnSequence);
  // Heads: 6 of queries, 3 of keys, 2 of values.
  EXPECT_THAT(shapes(), ::testing::ElementsAre("attention.query_key_value.weight 22"));
  const HeadProjections::Heads heads = projections.all(x_BTC, {}).first;
  const auto equal = [&](const at::Tensor& part, std::int64_t first_head, std::int64_t count) {
    return at::allclose(
        part, expected("attention.query_key_value.weight", x_BTC, first_head * kHeadDim, count));
  };
  EXPECT_TRUE(equal(heads.q_BHTD[0], 0, 4) && equal(heads.k_BHTD[0], 6, 2) &&
              equal(heads.v_BHTD[0], 9, 2));
  EXPECT_TRUE(equal(heads.q_BHTD[1], 4, 2) && equal(heads.k_BHTD[1], 8, 1));
}

TEST_F(HeadProjectionsTest, AMemoryHasKeysAndValuesOfItsOwn) {
  groups = {{.heads = 2, .key_heads = 2}, {.heads = 4, .key_heads = 4, .has_value = false}};
  const HeadProjections projections = make(KeySource::kMemory);
  EXPECT_THAT(shapes(),
              ::testing::ElementsAre("attention.query.weight 12", "attention.key_value.weight 16"));
  const at::Tensor memory_BSC = at::rand({2, 3, kChannels}, at::kDouble);
  const HeadProjections::Heads own = projections.queries(x_BTC, {}).first;
  const HeadProjections::Heads other = projections.keys_and_values(memory_BSC, {}).first;
  EXPECT_TRUE(own.k_BHTD.empty() && own.v_BHTD.empty() && other.q_BHTD.empty());
  EXPECT_TRUE(at::allclose(own.q_BHTD[1], expected("attention.query.weight", x_BTC, 4, 4)));
  const auto equal = [&](const at::Tensor& part, std::int64_t first_head, std::int64_t count) {
    return at::allclose(
        part, expected("attention.key_value.weight", memory_BSC, first_head * kHeadDim, count));
  };
  EXPECT_TRUE(equal(other.k_BHTD[0], 0, 2) && equal(other.k_BHTD[1], 2, 4) &&
              equal(other.v_BHTD[0], 6, 2));
  EXPECT_TRUE(other.v_BHTD[1].is_same(other.k_BHTD[1]));
}

TEST_F(HeadProjectionsTest, GroupsWithoutKeysReadNoMemory) {
  EXPECT_THROW(make(KeySource::kMemory), Error);
}

}  // namespace
}  // namespace birkhoff
