#include "runtime/agreement.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cluster/base/error.h"
#include "configs/loader/config_io.h"
#include "runtime/run_checkpoints.h"
#include "runtime/tasks/task.h"
#include "tests/cluster/base/thread_group.h"
#include "tests/runtime/toy_training.h"

namespace birkhoff {
namespace {

using test::toy_config;
using test::ToyTraining;
using testing::HasSubstr;

struct Replica {
  at::Tensor weight = at::arange(12, at::kFloat).reshape({3, 4});
  at::Tensor moment = at::full({5}, 0.5, at::kDouble);
  TrainState state{20, 240, 1000, 0, false, {}};

  std::vector<TensorPart> parts() {
    return {whole_part("layer.weight", StateKind::kParameter, weight, 0),
            whole_part("adamw.m/layer.weight", StateKind::kOptimizer, moment, 0)};
  }
};

void flip_bit(const at::Tensor& tensor, std::int64_t element, int bit) {
  auto* bytes = static_cast<unsigned char*>(tensor.mutable_data_ptr());
  bytes[element * tensor.element_size() + bit / 8] ^= 1u << (bit % 8);
}

// The line that all of `size` ranks get after `harm` was applied to one or more of them.
std::string difference(int size, const std::function<void(int, Replica&)>& harm) {
  std::vector<std::string> lines(static_cast<std::size_t>(size));
  run_ranks(size, [&](ProcessGroup& group) {
    Replica replica;
    Agreement agreement(group, group, replica.parts(), fmt::format("node{}", group.rank()));
    EXPECT_EQ(agreement.find_difference(replica.state), "");
    harm(group.rank(), replica);
    lines[static_cast<std::size_t>(group.rank())] = agreement.find_difference(replica.state);
  });
  for (const std::string& line : lines) EXPECT_EQ(line, lines[0]) << "one line for all ranks";
  return lines[0];
}

TEST(Agreement, NamesTheRankTheTensorAndTheElementOfOneFlippedBit) {
  for (int bit = 0; bit < 32; ++bit) {
    const std::string line = difference(4, [bit](int rank, Replica& replica) {
      if (rank == 2) flip_bit(replica.weight, 7, bit);
    });
    EXPECT_THAT(line, HasSubstr("rank 2 does not match the other ranks"));
    EXPECT_THAT(line, HasSubstr("layer.weight (compared with rank 0: rank 2 on node2: 1 of 12 "
                                "elements, element 7 is "));
  }
}

TEST(Agreement, FindsEveryKindOfState) {
  const auto of_rank_1 = [](const std::function<void(Replica&)>& harm) {
    return difference(3, [&](int rank, Replica& replica) {
      if (rank == 1) harm(replica);
    });
  };
  EXPECT_THAT(of_rank_1([](Replica& r) { flip_bit(r.moment, 0, 63); }),
              HasSubstr("adamw.m/layer.weight"));
  EXPECT_THAT(of_rank_1([](Replica& r) {
                flip_bit(r.weight, 0, 3);
                flip_bit(r.moment, 0, 3);
              }),
              HasSubstr("layer.weight and 1 more"));
  EXPECT_THAT(of_rank_1([](Replica& r) { ++r.state.step; }), HasSubstr("step 21"));
  EXPECT_THAT(of_rank_1([](Replica& r) { ++r.state.consumed; }), HasSubstr("241 sequences"));
  EXPECT_THAT(of_rank_1([](Replica& r) { r.state.loss_scale.shrink(); }),
              HasSubstr("loss scale 0.5 for 0 steps"));
  EXPECT_THAT(of_rank_1([](Replica& r) { r.state.evaluation_due = true; }),
              HasSubstr("to be evaluated"));
  EXPECT_THAT(of_rank_1([](Replica& r) { r.state.lowest_loss = 0.5; }), HasSubstr("lowest 0.5"));
  EXPECT_THAT(of_rank_1([](Replica& r) { ++r.state.stale_evaluations; }),
              HasSubstr("1 evaluations after the lowest"));
  EXPECT_THAT(of_rank_1([](Replica& r) { ++r.state.tokens; }), HasSubstr("1001 tokens"));
  EXPECT_THAT(of_rank_1([](Replica& r) { ++r.state.skipped; }), HasSubstr("1 steps skipped"));
  // -0 and 0 are equal numbers but different bits.
  EXPECT_THAT(of_rank_1([](Replica& r) { flip_bit(r.weight, 0, 31); }),
              HasSubstr("element 0 is -0 instead of 0"));
}

// Centroids are no parameters, but every rank has the same.
TEST(Agreement, NamesAFlippedCentroid) {
  const configs::Config config = parse_config(
      "task { language_model {} } data { corpus: 'none' sequence_length: 16 } model { layers: 1 "
      "channels: 8 heads: 2 attention { group { mechanism { routing { clusters: 4 } } } } }",
      "test", {});
  run_ranks(3, [&](ProcessGroup& group) {
    const auto model = make_model(config, 11, at::kCPU);
    Agreement agreement(group, group, model_tensors(*model), fmt::format("node{}", group.rank()));
    const TrainState state{20, 240, 1000, 0, false, {}};
    EXPECT_EQ(agreement.find_difference(state), "");
    const Statistic& centroids = model->parameters().statistics().at(0);
    if (group.rank() == 1) flip_bit(centroids.value, 13, 20);
    EXPECT_THAT(
        agreement.find_difference(state),
        HasSubstr(fmt::format("rank 1 does not match the other ranks: "
                              "blocks.0.attention.groups.0.centroids (compared with rank 0: "
                              "rank 1 on node1: 1 of {} elements, element 13 is ",
                              centroids.value.numel())));
  });
}

TEST(Agreement, TellsAMajorityFromADraw) {
  const auto on = [](std::vector<int> harmed) {
    return [harmed](int rank, Replica& replica) {
      if (std::ranges::find(harmed, rank) != harmed.end()) flip_bit(replica.weight, rank, 5);
    };
  };
  EXPECT_THAT(difference(2, on({1})), HasSubstr("ranks 0 and 1 hold different bits"));
  EXPECT_THAT(difference(3, on({0})), HasSubstr("rank 0 does not match"));
  EXPECT_THAT(difference(3, on({0})), HasSubstr("compared with rank 1: rank 0 on node0"));
  EXPECT_THAT(difference(5, on({1, 4})), HasSubstr("ranks 1, 4 do not match"));
  EXPECT_THAT(difference(4, on({0, 1, 2})), HasSubstr("no majority"));
}

TEST(Agreement, OneRankAgreesWithItself) {
  const auto group = make_single_group();
  Replica replica;
  EXPECT_EQ(Agreement(*group, *group, replica.parts(), "here").find_difference(replica.state), "");
  EXPECT_EQ(group->ring().total_operations(), 0);
}

// A bit flips during training, on one rank and between two steps. It is found at the next check,
// before a step builds on more than `every` others.
TEST(Agreement, TheTrainerFindsAFlipWhenItIsDue) {
  const StopSignals signals;
  for (const bool restore : {false, true}) {
    configs::Config config = toy_config(20);
    config.mutable_agreement()->set_every(4);
    config.mutable_agreement()->set_on_difference(restore ? configs::Agreement::restore
                                                          : configs::Agreement::stop);
    testing::internal::CaptureStderr();  // the warning of restore
    run_ranks(3, [&](ProcessGroup& group) {
      ToyTraining training(config, group, at::kFloat);
      Agreement agreement(
          group, group,
          training_parts(training.model, training.buckets, *training.optimizer, group.size()),
          "here");
      training.agreement = &agreement;
      training.before_batch = [&](std::int64_t step) {
        if (step == 6 && group.rank() == 1) {
          flip_bit(training.model.parameters().list()[0].value.detach(), 3, 20);
        }
      };
      try {
        EXPECT_EQ(training.run(signals), Outcome::kRestore);
        EXPECT_TRUE(restore);
      } catch (const Error& error) {
        EXPECT_FALSE(restore);
        EXPECT_EQ(error.code(), ExitCode::kNumerical);
        EXPECT_THAT(error.what(), HasSubstr("step 8: rank 1 does not match"));
        EXPECT_THAT(error.what(), HasSubstr("embedding"));
      }
      EXPECT_EQ(training.state.step, 8);
    });
    const std::string warning = testing::internal::GetCapturedStderr();
    EXPECT_EQ(warning.find("going back to the last checkpoint") != std::string::npos, restore);
  }
}

}  // namespace
}  // namespace birkhoff
