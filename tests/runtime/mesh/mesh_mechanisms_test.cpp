// Every mechanism in training on meshes of both axes, and the bits of ZeRO's stages there.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <map>
#include <mutex>

#include "cluster/base/error.h"
#include "configs/loader/check.h"
#include "models/parallel/parameter_use.h"
#include "tests/attention/mechanisms/mechanism_cases.h"
#include "tests/runtime/mesh/mesh_training.h"

namespace birkhoff {
namespace {

bool can_be_trained(const test::MechanismCase& each, const MechanismTraits&) {
  try {
    check_trains(each.config, SourceLocations("test"));
  } catch (const Error& error) {
    if (error.code() != ExitCode::kConfig) throw;
    return false;
  }
  return true;
}

class EachMechanismOnAMesh : public ::testing::TestWithParam<test::MechanismCase> {};
INSTANTIATE_TEST_SUITE_P(TrainingOnAMesh, EachMechanismOnAMesh,
                         ::testing::ValuesIn(test::cases_where(can_be_trained)), test::name_of);

TEST_P(EachMechanismOnAMesh, TakesTheStepsOfOneRank) {
  const test::MechanismCase& each = GetParam();
  std::vector<std::string> settings = {"data.sequence_length=16", "train.clip_norm=0.01",
                                       "model.attention=[{group {mechanism {" +
                                           test::with_noise(each.config).ShortDebugString() +
                                           "}}}]"};
  if (!each.causal) settings.emplace_back("task.classification={classes: 3}");
  expect_steps_of_one_rank({{2, 2}}, settings);
  settings.insert(settings.end(), {"train.recompute=true", "train.micro_batch=1",
                                   "train.invariant.shards=4", "train.zero_stage=3"});
  expect_steps_of_one_rank({{2, 2}}, settings);
}

// Whole parameters of each rank of the world after three steps.
std::map<std::string, at::Tensor> values_of_ranks(const std::vector<std::string>& settings) {
  std::map<std::string, at::Tensor> values;
  std::mutex mutex;
  run_mesh(2, 2, [&](const MeshRank& rank) {
    MeshTraining training(mesh_config(settings), rank);
    for (int step = 1; step <= 3; ++step) training.run(step);
    for (const Parameter& p : training.model->parameters().list()) {
      const ParameterUse use(training.model->parameters(), {p.unit});
      const std::lock_guard lock(mutex);
      values[p.name + " of rank " + std::to_string(rank.world.rank())] = p.value.detach().clone();
    }
  });
  return values;
}

TEST(TrainingOnAMesh, ZeroChangesNoBit) {
  for (const std::vector<std::string>& more :
       {std::vector<std::string>{},
        {"train.recompute=true", "train.precision=bf16"},
        {"train.micro_batch=1", "train.invariant.shards=4"}}) {
    std::vector<std::string> settings = {"train.precision=fp32", "train.zero_stage=0"};
    settings.insert(settings.end(), more.begin(), more.end());
    const auto expected = values_of_ranks(settings);
    ASSERT_GT(expected.size(), 40u);
    for (const int stage : {1, 2, 3}) {
      settings[1] = "train.zero_stage=" + std::to_string(stage);
      const auto values = values_of_ranks(settings);
      for (const auto& [name, value] : expected) {
        EXPECT_TRUE(at::equal(values.at(name), value)) << name << ", stage " << stage;
      }
    }
  }
}

}  // namespace
}  // namespace birkhoff
