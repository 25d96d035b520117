// ZeRO: each rank keeps and updates slices, and every bit of the result stays the same.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>

#include "runtime/agreement.h"
#include "tests/cluster/base/thread_group.h"
#include "tests/runtime/optimizers/gathered_state.h"
#include "tests/runtime/optimizers/gradient_norm.h"

namespace birkhoff {
namespace {

using test::gathered_state;
using test::gradient_norm;
using test::toy_config;
using test::ToyTraining;

std::size_t optimizer_bytes(ToyTraining& training) {
  std::size_t bytes = 0;
  for (const TensorPart& part : training.optimizer->state()) bytes += part.data.nbytes();
  return bytes;
}

configs::Config config_with(int steps, int shards, std::int64_t bucket_elements, int zero) {
  configs::Config config = toy_config(steps);
  config.mutable_train()->mutable_invariant()->set_shards(shards);
  config.mutable_train()->set_bucket_elements(bucket_elements);
  config.mutable_train()->set_zero_stage(zero);
  return config;
}

// Trains in each ZeRO stage and expects the bits of stage 0, also of the losses' count. num_states:
// tensors of the optimizer for each parameter.
void expect_bits_of_stage_0(configs::Config config, ProcessGroup& group, std::size_t num_states,
                            const StopSignals& signals) {
  std::map<std::string, std::string> expected;
  std::int64_t tokens = 0;
  const configs::Train& train = config.train();
  for (const int stage : {0, 1, 2, 3}) {
    if (stage > 1 && train.invariant().shards() == 0 && train.micro_batch() > 0) continue;
    config.mutable_train()->set_zero_stage(stage);
    ToyTraining training(config, group, at::kFloat);
    training.model.recompute = train.micro_batch() > 0;
    training.model.spoil(3, 2 * 12 + 5);  // a step that all ranks skip
    training.run(signals);
    const auto state = gathered_state(training, group);
    EXPECT_EQ(state.size(), 5u + 1 + num_states * 5 + 1);  // with a statistic, and the updates
    if (stage == 0) {
      expected = state;
      tokens = training.state.tokens;
    }
    EXPECT_EQ(state, expected) << "stage " << stage << ", " << group.size() << " ranks, "
                               << train.ShortDebugString();
    EXPECT_EQ(training.state.tokens, tokens);
  }
}

// With several micro-batches stages 2 and 3 add the sums of passes, not the gradients of a rank.
constexpr std::int64_t kMicroBatches[] = {0, 2};

TEST(Zero, EachStageTrainsToTheSameBitsWithASliceOfTheState) {
  const StopSignals signals;
  for (const int ranks : {1, 2, 3, 4}) {
    for (const int shards : {0, 5, 6}) {
      for (const std::int64_t micro_batch : kMicroBatches) {
        for (const std::int64_t bucket_elements : {1, 60, 1 << 20}) {
          run_ranks(ranks, [&](ProcessGroup& group) {
            configs::Config config = config_with(8, shards, bucket_elements, 0);
            config.mutable_train()->set_micro_batch(static_cast<int>(micro_batch));
            expect_bits_of_stage_0(config, group, /*num_states=*/2, signals);
          });
        }
      }
    }
  }
}

TEST(Zero, SgdTrainsToTheSameBitsInEachStage) {
  const StopSignals signals;
  for (const int ranks : {1, 2, 3}) {
    for (const int shards : {0, 6}) {
      run_ranks(ranks, [&](ProcessGroup& group) {
        configs::Config config = config_with(8, shards, 60, 0);
        config.mutable_train()->mutable_optimizer()->mutable_sgd()->set_momentum(0.9f);
        config.mutable_train()->mutable_optimizer()->mutable_sgd()->set_weight_decay(0.01f);
        expect_bits_of_stage_0(config, group, /*num_states=*/1, signals);
      });
    }
  }
}

// A rank with fewer micro-batches than the others passes with them, and that pass does not count:
// of 14 sequences three ranks have 5, 5 and 4, so in micro-batches of 1, 2 and 4 one of them has a
// pass less.
TEST(Zero, PassesOfStages2And3AddUpToTheGradientsOfStage1) {
  const StopSignals signals;
  for (const int micro_batch : {1, 2, 4}) {
    for (const int stage : {2, 3}) {
      run_ranks(3, [&](ProcessGroup& group) {
        at::Tensor expected;
        for (const int of : {1, stage}) {
          configs::Config config = config_with(5, 0, 60, of);
          config.mutable_train()->set_global_batch(14);
          config.mutable_train()->set_micro_batch(micro_batch);
          ToyTraining training(config, group, at::kDouble);
          training.run(signals);
          std::vector<at::Tensor> own;
          for (const GradBucket& bucket : training.buckets.buckets()) {
            own.push_back(bucket.own_values);
          }
          if (of == 1) {
            expected = at::cat(own).clone();
          } else {
            EXPECT_LE((at::cat(own) - expected).abs().max().item<double>(), 1e-12)
                << "stage " << stage << ", micro-batches of " << micro_batch;
          }
        }
      });
    }
  }
}

std::int64_t bytes_in_memory(const at::Tensor& tensor) {
  return static_cast<std::int64_t>(tensor.storage().nbytes());
}

// A model whose parameters never had memory starts with the same bits, whole and in parts.
TEST(Zero, Stage3DrawsOnlyItsSlicesOfTheInitialValues) {
  for (const std::int64_t bucket_elements : {1, 700, 1 << 20}) {
    run_mesh(3, 2, [&](const MeshRank& rank) {
      std::vector<at::Tensor> own;
      for (const bool sliced : {false, true}) {
        ModelPlacement place(at::kCPU, &rank.tensor);
        place.sliced = sliced;
        Parameters parameters(5, at::kFloat, at::kFloat, place);
        parameters.add("up", {30, 8}, Initializer::normal(1), true,
                       {.dim = 0, .sections = {{0, 10}, {10, 30}}});
        parameters.add("down", {7, 64}, Initializer::uniform(1), true, {.dim = 1});
        parameters.add("norm", {33}, Initializer::ones(), false);
        if (sliced) {
          for (const Parameter& each : parameters.list()) EXPECT_EQ(bytes_in_memory(each.value), 0);
        }
        GradBuckets buckets(parameters, rank.data, bucket_elements, 0, 3);
        std::vector<at::Tensor> all;
        for (const GradBucket& bucket : buckets.buckets()) all.push_back(bucket.own_values);
        own.push_back(at::cat(all).clone());
      }
      EXPECT_TRUE(at::equal(own[0], own[1])) << bucket_elements;
      if (rank.data.rank() == 0) {  // the last slice may be padding
        EXPECT_GT(own[0].abs().sum().item<float>(), 0);
      }
    });
  }
}

TEST(Zero, Stages2And3KeepSlicesBetweenSteps) {
  const StopSignals signals;
  run_ranks(4, [&](ProcessGroup& group) {
    for (const int stage : {1, 2, 3}) {
      for (const int shards : {0, 8}) {
        ToyTraining training(config_with(2, shards, 60, stage), group, at::kFloat);
        training.run(signals);
        for (const GradBucket& bucket : training.buckets.buckets()) {
          const std::int64_t all = bucket.elements() * 4;
          EXPECT_EQ(bytes_in_memory(bucket.gradients), stage > 1 ? 0 : all);
          EXPECT_EQ(bytes_in_memory(bucket.values), stage > 2 ? 0 : all);
          EXPECT_EQ(bytes_in_memory(bucket.own_gradients), stage > 1 ? all / 4 : all);
          EXPECT_EQ(bytes_in_memory(bucket.own_values), stage > 2 ? all / 4 : all);
        }
      }
    }
  });
}

TEST(Zero, ARankKeepsOneSliceOfEachBucket) {
  run_ranks(4, [](ProcessGroup& group) {
    ToyTraining plain(config_with(1, 0, 1 << 20, false), group, at::kFloat);
    ToyTraining zero(config_with(1, 0, 1 << 20, true), group, at::kFloat);
    const std::size_t count = sizeof(double);           // of updates, on every rank
    const std::size_t slice = 2 * sizeof(float) * 128;  // of 512 elements, padding included
    EXPECT_LE(optimizer_bytes(zero), slice + count);
    const at::Tensor slices =
        at::full({1}, static_cast<std::int64_t>(optimizer_bytes(zero) - count));
    group.all_reduce(slices, ReduceOp::kSum, "bytes of all slices");
    EXPECT_EQ(slices.item<std::int64_t>(), optimizer_bytes(plain) - count);
    // Every rank names every tensor, so that a surplus one in a checkpoint is noticed.
    std::set<std::string> plain_names, names;
    for (const TensorPart& part : plain.optimizer->state()) plain_names.insert(part.name);
    for (const TensorPart& part : zero.optimizer->state()) names.insert(part.name);
    EXPECT_EQ(names, plain_names);
  });
}

// The norm is a sum of blocks of 4096 elements: slices shorter and longer than a block cut them
// anywhere.
TEST(Zero, TheGradientNormHasTheSameBits) {
  for (const int ranks : {2, 3, 4, 7}) {
    for (const std::int64_t elements : {100, 5000, 30011, 90000}) {
      run_ranks(ranks, [&](ProcessGroup& group) {
        const auto norm = [&](bool zero) {
          Parameters parameters(1, at::kFloat);
          parameters.add("a", {elements}, Initializer::zeros(), true);
          parameters.add("b", {13}, Initializer::zeros(), true);
          parameters.add("c", {elements / 3}, Initializer::zeros(), true);
          GradBuckets buckets(parameters, group, elements, 0, zero ? 1 : 0);
          EXPECT_EQ(buckets.buckets().size(), 2u);
          for (const Parameter& parameter : parameters.list()) {
            const at::Tensor index = at::arange(parameter.value.numel(), at::kFloat);
            parameter.value.mutable_grad().copy_((index * 0.37 + group.rank()).sin());
          }
          buckets.begin_pass(/*last=*/true);
          buckets.finish_reducing({});
          const double finite = gradient_norm(buckets);
          // One non-finite element, in any rank's slice: all ranks learn of it.
          for (auto& bucket : buckets.buckets()) {
            const Interval owned = bucket.owned;
            const std::int64_t last = bucket.slots.back().offset;
            if (owned.begin <= last && last < owned.end) bucket.gradients[last].fill_(INFINITY);
          }
          EXPECT_FALSE(std::isfinite(gradient_norm(buckets)));
          return finite;
        };
        EXPECT_EQ(norm(true), norm(false)) << ranks << " ranks, " << elements << " elements";
      });
    }
  }
}

TEST(Zero, RanksCompareWhatTheyHoldInCommonAndNoSlices) {
  std::vector<std::string> lines(2);
  const StopSignals signals;
  run_ranks(2, [&](ProcessGroup& group) {
    ToyTraining training(config_with(2, 0, 60, true), group, at::kFloat);
    training.run(signals);
    Agreement agreement(group, group,
                        training_parts(training.model, training.buckets, *training.optimizer, 2),
                        "here");
    EXPECT_EQ(agreement.find_difference(training.state), "");
    if (group.rank() == 1) training.model.parameters().list()[0].value.detach()[0][0] += 1;
    lines[static_cast<std::size_t>(group.rank())] = agreement.find_difference(training.state);
  });
  EXPECT_EQ(lines[0], lines[1]);
  EXPECT_THAT(lines[0], testing::HasSubstr("embedding (compared with rank 0"));
}

}  // namespace
}  // namespace birkhoff
