// Schedules of a step: recorded ones, the traffic of their operations, and simulated times.
#include "launcher/measure/step_schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "configs/loader/config_io.h"
#include "launcher/measure/imitated_rank.h"
#include "launcher/measure/step_simulation.h"
#include "launcher/plan/rank_state.h"

namespace birkhoff {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
using Kind = ScheduledEvent::Kind;

MeshShape shape_of(GroupKind kind, int size, int stride = 1, int node_ranks = 1) {
  MeshShape mesh;
  mesh[static_cast<std::size_t>(kind)] = {
      .ranks = {.rank = 0, .size = size, .node_ranks = node_ranks}, .stride = stride};
  return mesh;
}

ScheduledOperation all_reduce(std::int64_t bytes, GroupKind group = GroupKind::kData) {
  return {.group = group, .input_bytes = bytes, .bytes = bytes};
}

double sum(const std::vector<TransferPhase>& phases, double TransferPhase::*bytes) {
  double total = 0;
  for (const TransferPhase& phase : phases) total += phase.*bytes;
  return total;
}

// An all-reduce of S bytes over n ranks sends 2 (n - 1) / n S from each, however the ranks are
// spread; in two levels, 2 (m - 1) / m S leave each of m nodes.
TEST(Phases, OfAnAllReduceSendTheLeastThatItNeeds) {
  constexpr double kBytes = 12e6;
  for (const int in_node : {1, 2, 4}) {
    for (const int nodes : {1, 2, 3}) {
      const int ranks = in_node * nodes;
      if (ranks == 1) continue;
      for (const bool levels : {false, true}) {
        const auto phases = phases_of(
            all_reduce(static_cast<std::int64_t>(kBytes)),
            {.ranks = {.rank = 0, .size = ranks, .node_ranks = levels ? in_node : 1}}, in_node);
        const double inside = sum(phases, &TransferPhase::inside_bytes),
                     between = sum(phases, &TransferPhase::between_bytes);
        EXPECT_NEAR(inside + between, 2 * kBytes * (ranks - 1) / ranks, 1e-3);
        const double of_node = levels ? 2 * kBytes * (nodes - 1) / nodes
                                      : 2 * kBytes * (ranks - in_node) / ranks * in_node;
        EXPECT_NEAR(between * in_node, of_node, 1e-3) << ranks << levels;
      }
    }
  }
}

TEST(Phases, OfASmallAllReduceSendAllAtOnce) {
  const GroupShape four{.ranks = {.rank = 0, .size = 4, .node_ranks = 1}};
  EXPECT_EQ(phases_of(all_reduce(16384), four, 4).size(), 1u);
  EXPECT_EQ(phases_of(all_reduce(16384), four, 4)[0].inside_bytes, 3 * 16384);
  EXPECT_EQ(phases_of(all_reduce(16388), four, 4).size(), 2u);
  EXPECT_TRUE(phases_of(all_reduce(16384), GroupShape{}, 4).empty()) << "a group of one";
}

// In a ring one rank of a node sends to another node, in as many rounds as there are other ranks.
TEST(Phases, OfNcclGatherInRings) {
  GroupShape shape{.ranks = {.rank = 0, .size = 4, .node_ranks = 1}, .on_gpus = true};
  constexpr std::int64_t kBytes = 4'000'000;
  const auto phases = phases_of(all_reduce(kBytes), shape, 2);
  ASSERT_EQ(phases.size(), 2u);
  EXPECT_EQ(phases[0].between_bytes, 2 * 1e6) << "slices go directly to their owners";
  EXPECT_EQ(phases[0].rounds, 1);
  EXPECT_EQ(phases[1].between_bytes, 3 * 1e6 / 2);
  EXPECT_EQ(phases[1].rounds, 3);
  EXPECT_EQ(phases_of(all_reduce(kBytes + 4), shape, 2)[1].rounds, 1) << "unequal slices";
  EXPECT_EQ(phases_of(all_reduce(4096), shape, 2)[0].rounds, 3) << "a small one is gathered";
  shape.ring_sums = true;
  for (const std::int64_t bytes : {kBytes, kBytes + 4, std::int64_t{4096}}) {
    const auto by_nccl = phases_of(all_reduce(bytes), shape, 2);
    ASSERT_EQ(by_nccl.size(), 2u);
    for (const TransferPhase& phase : by_nccl) EXPECT_EQ(phase.rounds, 3);
  }
}

// Ranks of a replica are neighbors, so those of the data axis are far apart.
TEST(Phases, KnowWhichRanksShareANode) {
  const GroupShape data{.ranks = {.rank = 0, .size = 4, .node_ranks = 1}, .stride = 2};
  const auto between = [&](int ranks_per_node) {
    return sum(phases_of(all_reduce(4'000'000), data, ranks_per_node),
               &TransferPhase::between_bytes);
  };
  EXPECT_EQ(between(8), 0);
  EXPECT_EQ(between(4), 2 * 1e6 * 2);
  EXPECT_EQ(between(2), 2 * 1e6 * 3);
  EXPECT_EQ(between(1), 2 * 1e6 * 3);
}

StepSchedule overlapped(double computation_behind) {
  StepSchedule schedule;
  schedule.operations = {all_reduce(8'000'000)};
  schedule.events = {
      {.kind = Kind::kCompute, .part = StepPart::kForward, .amount = 1},
      {.kind = Kind::kStart, .part = StepPart::kBackward, .operation = 0},
      {.kind = Kind::kCompute, .part = StepPart::kBackward, .amount = computation_behind},
      {.kind = Kind::kWait, .part = StepPart::kUpdate, .operation = 0}};
  return schedule;
}

// 8 MB over two ranks: 4 MB in each of two phases, of 0.1 s latency, at 1 MB/s: 8.2 s.
TEST(Simulation, HidesWhatComputationCovers) {
  const MeshShape mesh = shape_of(GroupKind::kData, 2);
  const NodeLinks links{1, {kInfinity}, {1e6, 0.1}};
  for (const double behind : {0.0, 3.0, 8.0, 9.0}) {
    const SimulatedStep step = simulate(overlapped(behind), mesh, links);
    EXPECT_NEAR(step.computation, 1 + behind, 1e-12);
    EXPECT_NEAR(step.exposed(), std::max(0.0, 8.2 - behind), 1e-9);
  }
}

// Two ranks of a node send through one link; inside a node nothing is shared.
TEST(Simulation, RanksOfANodeShareItsLink) {
  const auto seconds = [](int ranks_per_node) {
    return simulate(overlapped(0), shape_of(GroupKind::kData, 4),
                    {ranks_per_node, {kInfinity}, {1e6, 0}})
        .exposed();
  };
  EXPECT_NEAR(seconds(1), 2 * 6.0, 1e-9);
  EXPECT_NEAR(seconds(2), 2 * 4.0 * 2, 1e-9);
  EXPECT_NEAR(seconds(4), 0, 1e-9);
}

// Operations of one group queue up; those of another group do not wait for them, but for the link.
TEST(Simulation, GroupsRunAtTheSameTimeAndShareTheLink) {
  MeshShape mesh = shape_of(GroupKind::kData, 2);
  mesh[static_cast<std::size_t>(GroupKind::kTensor)] = mesh[1];
  StepSchedule schedule;
  schedule.operations = {all_reduce(8'000'000), all_reduce(8'000'000),
                         all_reduce(8'000'000, GroupKind::kTensor)};
  for (std::size_t i = 0; i < 3; ++i) {
    schedule.events.push_back({.kind = Kind::kStart, .operation = i});
  }
  for (std::size_t i = 0; i < 3; ++i) {
    schedule.events.push_back({.kind = Kind::kWait, .operation = i});
  }
  const auto seconds = [&](const Link& between) {
    return simulate(schedule, mesh, {1, {kInfinity}, between}).seconds;
  };
  EXPECT_NEAR(seconds({1e6, 0}), 24, 1e-9);               // 24 MB through one link
  EXPECT_NEAR(seconds({kInfinity, 0.1}), 4 * 0.1, 1e-9);  // of the group with two operations
}

configs::Config config_of(const std::vector<std::string>& settings) {
  return parse_config(R"(
    task { language_model {} }
    data { corpus: "none" sequence_length: 32 }
    model { layers: 3 channels: 32 heads: 4 attention { group { mechanism { dense {} } } } }
    train { global_batch: 8 micro_batch: 2 bucket_elements: 20000 })",
                      "test", settings);
}

// Steps that are computed and steps on the meta device have the same operations in the same order.
TEST(Recorder, MetaAndComputedStepsHaveTheSameOperations) {
  for (const std::vector<std::string>& settings :
       {std::vector<std::string>{"mesh.tensor=2"},
        {"train.zero_stage=1"},
        {"train.zero_stage=3"},
        {"mesh.tensor=2", "train.zero_stage=2", "train.recompute=true"},
        {"train.invariant.shards=4"},
        {"mesh.ranks_per_node=2", "mesh.zero_inside_nodes=true", "train.zero_stage=3"}}) {
    const configs::Config config = config_of(settings);
    const StepSchedule meta = rank_state(config, 64, 4).schedule,
                       computed = measured_schedule(config, 64, 4, at::kCPU, 1);
    const auto order = [](const StepSchedule& schedule) {
      std::vector<std::string> lines;
      for (const ScheduledEvent& event : schedule.events) {
        if (event.kind == Kind::kCompute) continue;
        const ScheduledOperation& operation = schedule.operations[event.operation];
        lines.push_back((event.kind == Kind::kStart ? "start " : "wait ") +
                        std::to_string(static_cast<int>(event.part)) + " " +
                        collective_name(operation.what) + " " + operation.purpose + " " +
                        std::to_string(operation.bytes) + " over " +
                        std::to_string(static_cast<int>(operation.group)));
      }
      return lines;
    };
    EXPECT_EQ(order(meta), order(computed)) << settings.front();
    EXPECT_GT(meta.operations.size(), 4u);
    for (const StepPart part : {StepPart::kForward, StepPart::kBackward}) {
      EXPECT_GT(meta.amount(part), 0);
      EXPECT_GT(computed.amount(part), 0);
    }
    // Twice the forward pass's products, and with recomputation the layers' once more. A rank that
    // has all of the output layer computes its gradients in the forward pass: here it has 1/22 of
    // the products, 2 x 32 x 64 FLOPs of a token.
    const double head = config.mesh().tensor() > 1 ? 0 : 1.0 / 22;
    const double twice = (2 - 2 * head) / (1 + 2 * head);
    const double ratio = meta.amount(StepPart::kBackward) / meta.amount(StepPart::kForward);
    EXPECT_GT(ratio, twice - 0.1);
    EXPECT_LT(ratio, config.train().recompute() ? 3.1 : twice + 0.1);
  }
}

// Passes that communicate nothing are counted, not made.
TEST(Schedule, HasTheComputationOfAllMicroBatches) {
  const auto schedule = [](const std::string& micro_batch) {
    return rank_state(config_of({"train.micro_batch=" + micro_batch}), 64, 2).schedule;
  };
  const StepSchedule whole = schedule("0");
  for (const std::string micro_batch : {"1", "2", "4"}) {
    const StepSchedule parts = schedule(micro_batch);
    for (const StepPart part : {StepPart::kForward, StepPart::kBackward}) {
      EXPECT_NEAR(parts.amount(part) / whole.amount(part), 1, 1e-6) << micro_batch;
    }
    EXPECT_EQ(parts.operations.size(), whole.operations.size());
  }
}

TEST(Schedule, ScalesEachPartAlone) {
  StepSchedule schedule = overlapped(4);
  schedule.scale(StepPart::kForward, 10);
  schedule.scale(StepPart::kBackward, 2);
  schedule.scale(StepPart::kUpdate, 0.5);
  EXPECT_NEAR(schedule.amount(StepPart::kForward), 10, 1e-12);
  EXPECT_NEAR(schedule.amount(StepPart::kBackward), 2, 1e-12);
  EXPECT_NEAR(schedule.amount(StepPart::kUpdate), 0.5, 1e-12);
  EXPECT_NEAR(simulate(schedule, shape_of(GroupKind::kData, 2), {1, {kInfinity}, {1e6, 0}}).seconds,
              10 + 8 + 0.5, 1e-9);
}

}  // namespace
}  // namespace birkhoff
