// Training on meshes of data-parallel and tensor-parallel ranks, which are threads here: steps,
// checkpoints, the comparison of replicas, and a rank that gives up a step.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <random>

#include "runtime/agreement.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/run_checkpoints.h"
#include "runtime/trainer.h"
#include "tests/runtime/checkpoint/checkpoint_fixture.h"
#include "tests/runtime/mesh/mesh_training.h"

namespace birkhoff {
namespace {

using testing::HasSubstr;

TEST(TrainingOnAMesh, TakesTheStepsOfOneRank) {
  const std::vector<Axes> all = {{1, 2}, {1, 4}, {2, 2}, {2, 1}, {2, 4}, {3, 2}};
  expect_steps_of_one_rank(all, {});
  expect_steps_of_one_rank(all, {"train.zero_stage=1", "train.recompute=true"});
  expect_steps_of_one_rank(all, {"train.zero_stage=2"});
  expect_steps_of_one_rank(all, {"train.zero_stage=3"});
  expect_steps_of_one_rank(all, {"train.zero_stage=3", "train.recompute=true"});
}

TEST(TrainingOnAMesh, WithSgdAndEachKindOfLayer) {
  const std::vector<Axes> some = {{1, 2}, {2, 2}, {3, 1}};
  const std::vector<std::string> kinds[] = {
      {"model.norm=post"},
      {"model.norm=post", "model.tie_embeddings=false"},
      {"model.attention_only=true", "model.head_channels=3"},
      {"model.norm=post", "model.attention_only=true", "model.head_channels=3"}};
  for (std::vector<std::string> settings : kinds) {
    settings.push_back("train.optimizer={sgd {weight_decay: 0.01 nesterov: true}}");
    SCOPED_TRACE(testing::PrintToString(settings));
    expect_steps_of_one_rank(some, settings);
    settings.push_back("train.zero_stage=3");
    expect_steps_of_one_rank(some, settings);
    settings.push_back("train.recompute=true");
    expect_steps_of_one_rank(some, settings);
  }
}

TEST(TrainingOnAMesh, WithMicroBatchesAndVirtualShards) {
  const std::vector<Axes> some = {{1, 2}, {2, 2}, {1, 4}};
  expect_steps_of_one_rank(some, {"train.micro_batch=1"});
  expect_steps_of_one_rank(some, {"train.invariant.shards=4", "train.micro_batch=1"});
  expect_steps_of_one_rank(some, {"train.invariant.shards=4", "train.zero_stage=1"});
  for (const std::string zero : {"train.zero_stage=2", "train.zero_stage=3"}) {
    expect_steps_of_one_rank(some, {"train.micro_batch=1", zero});
    expect_steps_of_one_rank(some, {"train.invariant.shards=4", "train.micro_batch=1", zero});
  }
}

// Tails have other numbers of tokens on each rank, and a rank may have none of one.
TEST(TrainingOnAMesh, WithAdaptiveSoftmaxOnDataParallelRanks) {
  const std::vector<std::string> adaptive = {
      "model.adaptive_softmax={cutoff: [3, 10] divisor: 2 tie_projections: true}",
      "model.dropout.token=0.2"};
  for (int stage = 0; stage <= 3; ++stage) {
    std::vector<std::string> settings = adaptive;
    settings.push_back("train.zero_stage=" + std::to_string(stage));
    expect_steps_of_one_rank({{2, 1}, {3, 1}, {8, 1}}, settings);
  }
  // The same bits with virtual shards.
  std::vector<std::string> settings = adaptive;
  settings.insert(settings.end(), {"train.invariant.shards=4", "train.precision=fp32"});
  std::map<std::string, at::Tensor> values;
  for (const int ranks : {1, 2, 4}) {
    run_mesh(ranks, 1, [&](const MeshRank& rank) {
      MeshTraining training(mesh_config(settings), rank);
      for (int step = 1; step <= 3; ++step) training.run(step);
      rank.world.barrier("trained");
      for (const Parameter& p : training.model->parameters().list()) {
        if (ranks == 1) values[p.name] = p.value.detach().clone();
        EXPECT_TRUE(at::equal(p.value, values.at(p.name))) << p.name << " on " << ranks;
      }
    });
  }
}

// ---- Checkpoints

// Any function of the element's name and place in the global tensor.
double value_at(const TensorPart& part, std::int64_t place) {
  return static_cast<double>((std::hash<std::string>()(part.name) + 31 * place) % 10007);
}

// Calls visit(i, place) for each element i of a part and its place in the global tensor.
template <typename Visit>
void for_each_place(const TensorPart& part, const Visit& visit) {
  const TensorRegion& region = part.region;
  for (std::int64_t flat = region.flat_begin; flat < region.flat_end; ++flat) {
    std::int64_t rest = flat, place = 0, stride = 1;
    for (std::size_t d = region.global_shape.size(); d-- > 0;) {
      place += (region.box_offset[d] + rest % region.box_size[d]) * stride;
      rest /= region.box_size[d];
      stride *= region.global_shape[d];
    }
    visit(flat - region.flat_begin, place);
  }
}

TEST(TrainingOnAMesh, AllOfItsStateMovesToEachOtherMesh) {
  constexpr Axes kMeshes[] = {{4, 1}, {2, 2}, {1, 4}, {1, 1}, {3, 1}};
  for (const Axes saved : kMeshes) {
    for (const std::string zero :
         {"train.zero_stage=0", "train.zero_stage=1", "train.zero_stage=3"}) {
      const TestFolder folder;
      run_mesh(saved.data, saved.tensor, [&](const MeshRank& rank) {
        MeshTraining training(mesh_config({zero}), rank);
        std::vector<TensorPart> parts = training.parts();
        for (TensorPart& part : parts) {
          for_each_place(part, [&](std::int64_t i, std::int64_t place) {
            part.data[i] = value_at(part, place);
          });
        }
        CheckpointWriter writer(folder, 1, {}, rank.world);
        writer.save(make_header(3), parts);
        writer.finish();
      });
      const auto checkpoint = find_newest_checkpoint(folder, false);
      ASSERT_TRUE(checkpoint);
      for (const auto& tensor : checkpoint->manifest.tensor()) {
        if (tensor.kind() == "optimizer") continue;
        EXPECT_EQ(tensor.key(), tensor.name()) << "Python reads whole tensors";
        EXPECT_TRUE(tensor.file().starts_with("model-")) << tensor.file();
      }
      for (const Axes loaded : kMeshes) {
        run_mesh(loaded.data, loaded.tensor, [&](const MeshRank& rank) {
          MeshTraining training(mesh_config({loaded.data > 2 ? "train.zero_stage=3" : zero}), rank);
          std::vector<TensorPart> parts = training.parts();
          load_checkpoint(*checkpoint, parts);
          std::int64_t elements = 0, wrong = 0;
          for (const TensorPart& part : parts) {
            for_each_place(part, [&](std::int64_t i, std::int64_t place) {
              ++elements;
              wrong += part.data[i].item<double>() != value_at(part, place);
            });
          }
          EXPECT_GT(elements, 1000);
          EXPECT_EQ(wrong, 0) << saved.data << " x " << saved.tensor << " to " << loaded.data
                              << " x " << loaded.tensor;
        });
      }
    }
  }
}

TEST(TrainingOnAMesh, RanksShareTheWorkOfACheckpoint) {
  std::vector<std::int64_t> bytes(4, 0);
  run_mesh(2, 2, [&](const MeshRank& rank) {
    MeshTraining training(mesh_config(), rank);
    for (const TensorPart& part : training.parts()) {
      ASSERT_LT(part.owner, 4);
      if (part.owner == rank.world.rank()) {
        bytes[static_cast<std::size_t>(part.owner)] +=
            static_cast<std::int64_t>(part.data.nbytes());
      }
    }
  });
  const auto [least, most] = std::minmax_element(bytes.begin(), bytes.end());
  EXPECT_GT(*least, *most / 3);
}

// ---- Faults

void flip_lowest_bit(const at::Tensor& tensor) {
  static_cast<unsigned char*>(tensor.mutable_data_ptr())[0] ^= 1u;
}

std::string difference_on_two_by_two(const std::function<void(int, MeshTraining&)>& harm,
                                     std::vector<std::string> settings = {}) {
  std::vector<std::string> lines(4);
  run_mesh(2, 2, [&](const MeshRank& rank) {
    MeshTraining training(mesh_config(settings), rank);
    Agreement agreement(rank.world, rank.data, training.parts(), "here", nullptr, &rank.tensor);
    const TrainState state{20, 240, 1000, 0, false, {}};
    EXPECT_EQ(agreement.find_difference(state), "");
    training.run(1);
    EXPECT_EQ(agreement.find_difference(state), "");
    harm(rank.world.rank(), training);
    lines[static_cast<std::size_t>(rank.world.rank())] = agreement.find_difference(state);
  });
  for (const std::string& line : lines) EXPECT_EQ(line, lines[0]) << "one line for all ranks";
  return lines[0];
}

TEST(TrainingOnAMesh, ARankThatDiffersFromItsReplicaIsNamed) {
  const auto flip = [](const char* name, int rank) {
    return [=](int of_mesh, MeshTraining& training) {
      for (const TensorPart& part : training.parts()) {
        if (of_mesh == rank && part.name == name) return flip_lowest_bit(part.data);
      }
    };
  };
  // The norm is on all four ranks, a part of the matrix on two.
  EXPECT_THAT(difference_on_two_by_two(flip("blocks.0.attention_norm.weight", 3)),
              HasSubstr("rank 3 does not match the other ranks: blocks.0.attention_norm.weight"));
  EXPECT_THAT(difference_on_two_by_two(flip("blocks.1.feed_forward.up.weight", 3)),
              HasSubstr("ranks 1 and 3 hold different bits"));
  EXPECT_THAT(difference_on_two_by_two(flip("adamw.v/embedding.weight", 0)),
              HasSubstr("ranks 0 and 2 hold different bits"));
  // Slices of whole tensors are on both ranks of a replica. This norm is in the slice of data rank
  // 0, because a slice has at least 64 elements.
  for (const std::string stage : {"train.zero_stage=1", "train.zero_stage=3"}) {
    EXPECT_THAT(difference_on_two_by_two(flip("adamw.m/blocks.0.attention_norm.weight", 1),
                                         {stage, "train.bucket_elements=1"}),
                HasSubstr("ranks 0 and 1 hold different bits"));
  }
  EXPECT_THAT(difference_on_two_by_two(flip("blocks.0.attention.groups.1.centroids", 2)),
              HasSubstr("ranks 0 and 2 hold different bits, and no majority says which are right: "
                        "blocks.0.attention.groups.1.centroids"));
}

// A rank that is asked to stop at any time takes with it the ranks with which its passes
// communicate, and no rank waits for them forever. BIRKHOFF_MESH_STOPS sets the number of trials.
TEST(TrainingOnAMesh, AStepThatOneRankGivesUpIsDoneByNone) {
  const char* const set = std::getenv("BIRKHOFF_MESH_STOPS");
  const int num_trials = set != nullptr ? std::atoi(set) : 20;
  std::mt19937 random(5);
  for (int trial = 0; trial < num_trials; ++trial) {
    const int who = static_cast<int>(random() % 4), when = static_cast<int>(random() % 6);
    const std::string zero = "train.zero_stage=" + std::to_string(trial % 4);
    SCOPED_TRACE(zero);
    run_mesh(2, 2, [&](const MeshRank& rank) {
      MeshTraining training(mesh_config({"train.micro_batch=1", zero}), rank);
      int asked = 0;
      const GradientSums sums = training.run(
          1, {.gives_up = [&] { return rank.world.rank() == who && asked++ >= when; }});
      EXPECT_EQ(sums.abandoned, when <= 4);  // asked at first, and before each of four sequences
      EXPECT_FALSE(training.run(2).abandoned);
    });
  }
  std::cout << "mesh stops: tried " << num_trials << ", lost " << (HasFailure() ? "some" : "0")
            << '\n';
}

// Before a stop the state is checked with the last batch. The one that only rank 0 got has fewer
// tokens, so ranks that checked with different batches would not understand each other.
TEST(TrainingOnAMesh, ABatchThatOneRankOfAReplicaLacksIsUsedByNone) {
  const StopSignals signals;
  const TestFolder folder;
  run_mesh(1, 2, [&](const MeshRank& rank) {
    MeshTraining training(mesh_config({"train.steps=9"}), rank);
    int asked = 0;
    DevicePrefetcher feed(
        [&]() -> std::optional<Batch> {
          Batch batch = training.batch(++asked);
          if (asked < 3) return batch;
          if (rank.tensor.rank() == 1) return std::nullopt;
          for (auto& [name, values] : batch.fields) values = values.narrow(1, 0, 4).contiguous();
          return batch;
        },
        at::kCPU);
    StopRequest stop(signals);
    Reporter reporter;
    Activity activity;
    CheckpointWriter writer(folder, 1, {}, rank.world);
    RunCheckpoints checkpoints(&writer, rank.world, make_header(0), training.parts(), std::nullopt,
                               nullptr, reporter);
    Trainer trainer({training.config, *training.model, feed, rank.data, rank.world,
                     training.buckets, *training.optimizer, stop, reporter, activity, checkpoints,
                     /*samples_per_epoch=*/100, nullptr, nullptr, training.pass_group()});
    TrainState state;
    EXPECT_EQ(trainer.run(state), Outcome::kRequeue);
    EXPECT_EQ(state.step, 2);
  });
  const auto checkpoint = find_newest_checkpoint(folder, false);
  ASSERT_TRUE(checkpoint);
  EXPECT_EQ(checkpoint->manifest.step(), 2);
}

TEST(TrainingOnAMesh, AValueThatIsNotFiniteOnOneRankStopsTheStepOfAll) {
  run_mesh(2, 2, [&](const MeshRank& rank) {
    MeshTraining training(mesh_config(), rank);
    const auto values = [&] {
      std::vector<at::Tensor> all;
      for (const Parameter& p : training.model->parameters().list()) {
        all.push_back(p.value.detach().flatten());
      }
      return at::cat(all).clone();
    };
    if (rank.world.rank() == 1) {
      for (const Parameter& p : training.model->parameters().list()) {
        if (p.name == "blocks.0.feed_forward.down.weight")
          p.value.detach().view({-1})[3] = INFINITY;
      }
    }
    const at::Tensor before = values();
    const GradientSums sums = training.run(1);
    EXPECT_FALSE(sums.finite());
    // The replica of ranks 0 and 1; the norm is that of all ranks.
    EXPECT_EQ(sums.losses_not_finite, (std::vector<int>{0, 1}));
    EXPECT_TRUE(at::equal(values(), before));
  });
}

}  // namespace
}  // namespace birkhoff
