// Extrapolations of `birkhoff plan` from trials of smaller shapes, against trials of the whole, and
// the cost of plans of the shipped configurations.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cluster/base/instruction_set.h"
#include "configs/loader/check.h"
#include "configs/loader/config_io.h"
#include "launcher/app.h"
#include "launcher/measure/peak_memory.h"
#include "launcher/measure/synthetic_training.h"
#include "launcher/plan/trial.h"
#include "runtime/tasks/task.h"
#include "tests/cluster/base/thread_group.h"
#include "tests/processor_time.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

constexpr std::int64_t kVocabulary = 70;

configs::Config config_of(const std::vector<std::string>& settings) {
  return parse_config(R"(
task { language_model {} }
data { corpus: "none" sequence_length: 64 }
model { layers: 5 channels: 32 heads: 4 }
)",
                      "test", settings);
}

// The whole micro-batch is tried, or only the smallest shapes.
constexpr TrialLimits kAll{.flops = 1e18, .bytes = 1e18}, kSmallest{.flops = 1};

double total(const TrialMemory& memory) { return memory.layers + memory.rest + memory.temporary; }

// The whole model on the whole micro-batch, counted, against an extrapolation from fewer layers and
// sequences. No layer has clusters, whose sizes, and so their memory, depend on the tokens; and
// sequences are long enough for LibTorch to multiply bf16 in the same way for any number of them.
TEST(Trial, MemoryOfAMicroBatchIsExtrapolated) {
  const char *of_text = "task={language_model{}}", *of_pairs = "task={translation{}}";
  for (const auto& [task, recompute, precision] :
       {std::tuple(of_text, "train.recompute=false", "train.precision=fp32"),
        std::tuple(of_text, "train.recompute=true", "train.precision=fp32"),
        std::tuple(of_text, "train.recompute=true", "train.precision=bf16"),
        std::tuple(of_pairs, "train.recompute=false", "train.precision=fp32"),
        std::tuple(of_pairs, "train.recompute=true", "train.precision=fp32")}) {
    SCOPED_TRACE(testing::Message() << task << " " << recompute << " " << precision);
    const configs::Config config =
        config_of({task, recompute, precision, "model.layers=7", "train.global_batch=6",
                   "train.micro_batch=0", "data.sequence_length=256", "evaluate.micro_batch=4",
                   "model.attention=[{group{mechanism{dense{}}}},"
                   " {group{heads:2 mechanism{dense{}}} group{mechanism{sinkhorn{}}}}]"});
    const bool recomputes = config.train().recompute();
    const TrialMemory whole = Trial(config, kVocabulary, 6, kAll).memory(recomputes);
    const TrialMemory part = Trial(config, kVocabulary, 6, kSmallest).memory(recomputes);
    EXPECT_NEAR(part.layers / whole.layers, 1, 0.01);
    EXPECT_NEAR(total(part) / total(whole), 1, 0.02);
    // With one sequence the peak is at another place than with two, because weights in bf16 matter.
    EXPECT_NEAR(part.evaluation / whole.evaluation, 1, 0.05);

    PeakMemory memory(at::kCPU);
    SyntheticTraining training(config, kVocabulary, at::kCPU);
    training.timed_parts();
    memory.restart();
    training.timed_parts();
    EXPECT_NEAR(total(whole) / static_cast<double>(memory.extra_bytes()), 1, 1e-3);
    const at::NoGradGuard no_gradients;
    const Batch evaluated = make_task(config)->synthetic_batch(kVocabulary, at::kCPU).narrow(0, 4);
    memory.restart();
    training.model().loss_sums(evaluated, std::nullopt);
    EXPECT_NEAR(whole.evaluation / static_cast<double>(memory.extra_bytes()), 1, 1e-3);
  }
}

TEST(Trial, AnEvaluationMayTakeMoreThanAStep) {
  const auto evaluation = [](const char* micro_batch) {
    return Trial(config_of({micro_batch}), kVocabulary, 1).memory(false).evaluation;
  };
  EXPECT_NEAR(evaluation("evaluate.micro_batch=32") / evaluation("evaluate.micro_batch=16"), 2,
              0.1);
}

// Of 32 channels, and 128 in a feed-forward layer: 8 * 32 + 4 * heads + 4 * 128 values per token.
TEST(Trial, EstimatesOfUsualLayersCountTheWidthOfHeads) {
  const auto estimate = [](const char* head_channels) {
    Trial trial(config_of({head_channels}), kVocabulary, 4, {.flops = 1, .bytes = 1});
    EXPECT_FALSE(trial.layers_fit());
    return trial.memory(false).layers;
  };
  EXPECT_DOUBLE_EQ(estimate("model.head_channels=0"), estimate("model.head_channels=8"));
  EXPECT_DOUBLE_EQ(estimate("model.head_channels=64"), 2 * estimate("model.head_channels=8"));
}

// An encoder's layer keeps as much; a decoder's also 4 * 32 + 2 * heads, and 2 * heads for each
// token of the memory.
TEST(Trial, EstimatesOfUsualLayersCountBothStacks) {
  Trial trial(config_of({"task={translation{target_length:32}}", "model.encoder={layers:2}"}),
              kVocabulary, 4, {.flops = 1, .bytes = 1});
  const double encoder = 64 * (8 * 32 + 4 * 32 + 4 * 128),
               decoder = 32 * (12 * 32 + 6 * 32 + 4 * 128) + 64 * 2 * 32;
  EXPECT_DOUBLE_EQ(trial.memory(false).layers, 4 * 4 * (2 * encoder + 5 * decoder));
}

TEST(Trial, RecomputationKeepsLess) {
  Trial trial(config_of({}), kVocabulary, 4);
  EXPECT_LT(3 * trial.memory(true).layers, trial.memory(false).layers);
}

// What layers keep for the backward pass: each rank of mesh.tensor has its part of the heads and
// hidden units, and of the tokens between the sublayers. Real ranks keep what the plan's rank does.
TEST(Trial, RanksOfAReplicaShareActivations) {
  const auto config_for = [](int tensor, int layers) {
    return config_of({"model.layers=" + std::to_string(layers), "model.channels=64",
                      "mesh.tensor=" + std::to_string(tensor), "model.dropout.residual=0.1",
                      "model.attention=[{group{mechanism{dense{}}}},"
                      " {group{mechanism{block_local{block:16}}}}]"});
  };
  const auto kept = [&](int tensor, int layers) {
    return CountedModel(config_for(tensor, layers), kVocabulary, at::kCPU).train(4).kept;
  };
  const double whole = kept(1, 4) - kept(1, 2);
  for (const int tensor : {2, 4}) {
    EXPECT_NEAR(tensor * (kept(tensor, 4) - kept(tensor, 2)) / whole, 1, 0.02) << tensor;

    const configs::Config config = config_for(tensor, 4);
    PeakMemory memory(at::kCPU);
    double counted = 0;
    run_mesh(1, tensor, [&](const MeshRank& rank) {
      const auto model = make_model(config, kVocabulary, {at::kCPU, &rank.tensor});
      const Batch batch = make_task(config)->synthetic_batch(kVocabulary, at::kCPU).narrow(0, 4);
      const NoiseKey noise{1, at::zeros({1}, batch.sample_ids_B.options()), 0, batch.sample_ids_B,
                           batch.global_size};
      rank.world.barrier("all hold their parameters");
      if (rank.world.rank() == 0) memory.restart();
      rank.world.barrier("counts");
      const LossSums sums = model->loss_sums(batch, noise);
      rank.world.barrier("all hold their activations");
      if (rank.world.rank() == 0) counted = static_cast<double>(memory.live_bytes());
      rank.world.barrier("counted");
    });
    EXPECT_NEAR(counted / (tensor * kept(tensor, 4)), 1, 0.01) << tensor;
  }
}

// Embedding, head and loss are counted on shapes where they are too large to try. On the CPU
// products also allocate scratch memory, up to 1.1 % of these small models.
TEST(Trial, ShapesCountAsTensorsDo) {
  const std::vector<std::string> models[] = {
      {"train.precision=fp32"},
      {"train.precision=bf16", "model.tie_embeddings=false"},
      {"train.precision=bf16", "model.embedding_channels=16", "model.dropout.embedding=0.1"},
      {"task={classification{}}", "model.positions=sinusoidal"}};
  for (std::vector<std::string> settings : models) {
    SCOPED_TRACE(settings.back());
    configs::Config config = config_of(settings);
    config.mutable_model()->set_layers(0);
    for (const std::int64_t vocabulary : {70, 7000}) {
      CountedModel tensors(config, vocabulary, at::kCPU), shapes(config, vocabulary, at::kMeta);
      const CountedModel::Bytes of_tensors = tensors.train(3), of_shapes = shapes.train(3);
      EXPECT_NEAR(of_shapes.kept / of_tensors.kept, 1, 0.02);
      EXPECT_NEAR(of_shapes.peak / of_tensors.peak, 1, 0.02);
      EXPECT_NEAR(shapes.evaluate(3) / tensors.evaluate(3), 1, 0.02);
    }
  }
}

// Shapes do not say how many tokens a tail has. The number that is assumed is that of Zipf's law;
// that of a sample of 64 sequences differs by a few percent.
TEST(Trial, TailsCountByTheirExpectedShare) {
  configs::Config config = config_of({"model.adaptive_softmax={cutoff: [100, 1000] divisor: 2}"});
  config.mutable_model()->set_layers(0);
  CountedModel tensors(config, 7000, at::kCPU), shapes(config, 7000, at::kMeta);
  const CountedModel::Bytes of_tensors = tensors.train(64), of_shapes = shapes.train(64);
  EXPECT_NEAR(of_shapes.kept / of_tensors.kept, 1, 0.02);
  EXPECT_NEAR(of_shapes.peak / of_tensors.peak, 1, 0.1);
  EXPECT_NEAR(shapes.evaluate(64) / tensors.evaluate(64), 1, 0.1);
  // A trial with few ids has ids in every tail.
  EXPECT_GT(Trial(config_of({"model.adaptive_softmax={cutoff: [100, 1000] divisor: 2}"}), 7000, 4)
                .memory(false)
                .rest,
            0);
}

// Layers of which a trial shortens sequences, with a head that outweighs them.
struct TriedModel {
  std::string name;
  std::vector<std::string> settings;
};
const std::vector<TriedModel> kTriedModels = {
    {"dense", {"model.attention=[{group{mechanism{dense{}}}}]"}},
    {"Sinkhorn", {"model.attention=[{group{mechanism{sinkhorn{block:32}}}}]"}},
    {"local and routing",
     {"model.attention=[{group{heads:2 mechanism{block_local{block:32 look_back:1}}}"
      " group{mechanism{routing{clusters:16 dropout:0.1}"
      " relative_positions{max_distance:64}}}}]"}},
    {"MoBA", {"model.attention=[{group{mechanism{moba{block:32}}}}]"}},
    {"Sparse Transformer", {"model.attention=[{group{mechanism{sparse_transformer{stride:32}}}}]"}},
    {"sliding window", {"model.attention=[{group{mechanism{sliding_window{width:64}}}}]"}},
    {"last layer differs",
     {"model.attention=[{group{mechanism{dense{}}}},{group{mechanism{dense{}}}},"
      "{group{mechanism{sinkhorn{block:32}}}}]"}},
    {"classification",
     {"task={classification{}}", "model.attention=[{group{mechanism{dense{}}}}]"}},
    {"SortCut",
     {"task={classification{}}",
      "model.attention=[{group{mechanism{sortcut{sinkhorn{block:32}}}}}]"}},
    {"two stacks",
     {"task={translation{}}",
      "model.encoder={layers:2 attention{group{mechanism{sinkhorn{block:32}}}}}",
      "model.attention=[{group{mechanism{dense{}}}}]"}},
    {"two stacks, with more in the encoder, of short targets",
     {"task={translation{target_length:256}}",
      "model.encoder={layers:4 attention{group{mechanism{sinkhorn{block:32}}}}"
      " attention{group{mechanism{block_local{block:32}}}}}",
      "model.attention=[{group{mechanism{block_local{block:32}}}}]"}},
};

configs::Config tried_config(const TriedModel& model, std::vector<std::string> more = {}) {
  std::vector<std::string> settings = {"model.layers=3", "model.channels=64",
                                       "data.sequence_length=1024", "evaluate.micro_batch=2"};
  settings.insert(settings.end(), model.settings.begin(), model.settings.end());
  settings.insert(settings.end(), more.begin(), more.end());
  return config_of(settings);
}

TEST(Trial, MemoryOfShorterSequencesIsExtrapolated) {
  constexpr std::int64_t kIds = 1000;
  for (const TriedModel& model : kTriedModels) {
    for (const auto& [precision, sequences, recompute] :
         {std::tuple("train.precision=fp32", 1, false),
          std::tuple("train.precision=bf16", 2, true)}) {
      SCOPED_TRACE(model.name + " " + precision);
      const configs::Config config = tried_config(model, {precision});
      Trial all(config, kIds, sequences, kAll), smallest(config, kIds, sequences, kSmallest);
      const TrialMemory whole = all.memory(recompute), part = smallest.memory(recompute);
      EXPECT_EQ(all.tried(), "");
      EXPECT_THAT(smallest.tried(),
                  HasSubstr(fmt::format("2 of {} layers and {} of ",
                                        config.model().layers() + config.model().encoder().layers(),
                                        target_length(config) == 1024 ? 512 : 1024)));
      EXPECT_NEAR(part.layers / whole.layers, 1, 0.1);
      EXPECT_NEAR(total(part) / total(whole), 1, 0.1);
      EXPECT_NEAR(part.evaluation / whole.evaluation, 1, 0.1);
    }
  }
}

TEST(Trial, LayersOfBothStacksAreTimed) {
  Trial trial(config_of({"task={translation{}}", "data.sequence_length=1024"}), 1000, 1, kSmallest);
  trial.memory(false);
  const TrialTimes times = trial.times(/*rounds=*/3, /*neighbours=*/0);
  EXPECT_THAT(trial.tried(), HasSubstr("1 of 10 layers, 256 of 1024 tokens"));
  EXPECT_GT(times.step.forward, 0);
  EXPECT_GT(times.step.backward, 0);
  EXPECT_GT(times.step.optimizer, 0);
}

TEST(Trial, MoreTokensOrIdsNeverNeedLess) {
  for (const TriedModel& model : kTriedModels) {
    double last = 0;
    for (const std::int64_t size : {1, 4, 16}) {
      const std::string length = "data.sequence_length=" + std::to_string(512 * size);
      const double bytes =
          total(Trial(tried_config(model, {length}), 50 * size, 1, kSmallest).memory(false));
      EXPECT_GT(bytes, last) << model.name << " " << length;
      last = bytes;
    }
  }
}

// The largest resident set of this process since the last call, and its present one, in bytes.
std::pair<double, double> resident_bytes() {
  std::ifstream status("/proc/self/status");
  std::string word;
  double peak = 0, now = 0;
  while (status >> word) {
    if (word == "VmHWM:") status >> peak;
    if (word == "VmRSS:") status >> now;
  }
  std::ofstream("/proc/self/clear_refs") << 5;
  return {1024 * peak, 1024 * now};
}

// A login node has little memory and patience. Processor time, because other tests may run, too.
TEST(PlanCommandOfShippedConfigs, TakesOneGigabyteAndHalfAMinute) {
  std::size_t plans = 0;
  for (const auto& file : fs::directory_iterator(BIRKHOFF_SOURCE_DIR "/configs")) {
    if (file.path().extension() != ".txtpb") continue;
    const std::string name = file.path().stem().string();
    SCOPED_TRACE(name);
    const auto named = [&](const char* part) { return name.find(part) != std::string::npos; };
    const std::string ids = named("wikitext103") ? "267735"
                            : named("enwik8")    ? "256"
                            : named("baby_gpt")  ? "65"
                                                 : "32000";
    const double before = resident_bytes().second;
    const double start = processor_seconds();
    std::ostringstream out, err;
    // With batch norms each rank needs a set of a batch.
    const char* ranks = named("pct") ? "16" : "64";
    std::vector<std::string> line = {"plan", file.path().string(), "--ranks", ranks, "--json"};
    const bool of_images =
        named("mnist") || named("cifar") || named("imagenet") || named("cats_and_dogs");
    const bool of_points = named("modelnet40");
    if (!of_images && !of_points) line.insert(line.end(), {"--vocabulary", ids});
    // LibTorch has no fast bf16 products there.
    if (!is_supported(InstructionSet::kAvx512)) {
      line.insert(line.end(), {"--set", "train.precision=fp32"});
    }
    EXPECT_EQ(run_app(line, out, err), 0) << err.str();
    EXPECT_LT(processor_seconds() - start, 30);
    EXPECT_LT(resident_bytes().first - before, 0.75e9);  // a process starts with 0.25e9
    EXPECT_GT(nlohmann::json::parse(out.str())["memory"]["total"]["configured"].get<double>(), 1e6);
    ++plans;
  }
  EXPECT_GE(plans, 15U);
  if (!is_supported(InstructionSet::kAvx512)) {
    GTEST_SKIP() << "bf16, because this CPU has no AVX-512";
  }
}

// A point cloud transformer reads at least two points for each neighbor, and a multiple of four.
TEST(Trial, SetsHoldTheNeighborsOfTheirPoints) {
  std::ostringstream out, err;
  EXPECT_EQ(
      run_app({"plan", std::string(BIRKHOFF_SOURCE_DIR) + "/configs/modelnet40_pct_paper.txtpb",
               "--ranks", "2", "--json", "--set", "data.sequence_length=1024", "--set",
               "task.point_sets.point_cloud_transformer.neighbors=129"},
              out, err),
      0)
      << err.str();
}

}  // namespace
}  // namespace birkhoff
