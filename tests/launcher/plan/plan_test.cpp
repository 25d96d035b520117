// Predictions of `birkhoff plan` against the runtime: parameters, memory, communication and
// checkpoints; and its model of faults against a simulation.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "configs/loader/config_io.h"
#include "launcher/app.h"
#include "launcher/measure/peak_memory.h"
#include "launcher/measure/synthetic_training.h"
#include "launcher/plan/plan.h"
#include "launcher/plan/rank_state.h"
#include "runtime/run_checkpoints.h"
#include "runtime/tasks/task.h"
#include "tests/cluster/base/temporary_folder.h"
#include "tests/cluster/base/thread_group.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

constexpr std::int64_t kVocabulary = 70;

// Two kinds of layers, one with statistics and sums of figures, and buckets that cut tensors.
constexpr const char* kConfig = R"(
task { language_model {} }
data { corpus: "none" sequence_length: 64 }
model {
  layers: 5 channels: 32 heads: 4
  attention { group { mechanism { dense {} } } }
  attention { group { heads: 2 mechanism { routing { clusters: 4 } } }
              group { mechanism { sinkhorn { block: 16 } } } }
}
train { global_batch: 12 micro_batch: 2 bucket_elements: 5000 }
checkpoint { every: 10 }
evaluate { micro_batch: 1 }
)";

configs::Config config_of(const std::vector<std::string>& settings = {}) {
  return parse_config(kConfig, "test", settings);
}

// The model, state and step of one rank, on synthetic tokens.
struct RankTraining {
  RankTraining(const configs::Config& config_in, const MeshRank& of_mesh)
      : config(config_in),
        rank(of_mesh),
        model(make_model(config, kVocabulary, {at::kCPU, &rank.tensor})),
        buckets(model->parameters(), rank.data, config.train().bucket_elements(),
                config.train().invariant().shards(), config.train().zero_stage()),
        optimizer(make_optimizer(config.train().optimizer(), buckets)),
        step(config.train(), *model, rank.data, rank.world, buckets, *optimizer, nullptr,
             buckets.passes_are_collective() ? &rank.world : nullptr) {}

  void take_step(const Batch& batch) {
    step.update(step.sum_gradients(batch, 1, 1), 1, /*epoch=*/0, 1);
  }

  const configs::Config config;
  const MeshRank rank;
  const std::unique_ptr<Model> model;
  GradBuckets buckets;
  const std::unique_ptr<Optimizer> optimizer;
  TrainingStep step;
};

// The rank's rows of the global batch.
Batch batch_of_rank(const configs::Config& config, const ProcessGroup& group) {
  const Interval rows = rank_share(config.train().global_batch(),
                                   config.train().invariant().shards(), group.rank(), group.size());
  Batch batch =
      make_task(config)->synthetic_batch(kVocabulary, at::kCPU).narrow(rows.begin, rows.end);
  batch.global_size = config.train().global_batch();
  return batch;
}

// Operations and bytes by purpose and group.
using Counted = std::map<std::pair<std::string, GroupKind>, std::pair<std::int64_t, std::int64_t>>;

void expect_exchanges(int data, const configs::Config& config) {
  const int tensor = config.mesh().tensor();
  Counted expected;
  const MeshShape shape = mesh_shape(config, data * tensor);
  const StepSchedule schedule = rank_state(config, kVocabulary, data * tensor).schedule;
  for (const Exchange& each : exchanges_of(schedule, shape, /*ranks_per_node=*/1)) {
    expected[{each.what, each.group}] = {each.operations, each.bytes};
    EXPECT_GT(each.sent_bytes, 0) << each.what;
  }
  EXPECT_EQ(expected.empty(), data * tensor == 1);
  run_mesh(data, tensor, [&](const MeshRank& rank) {
    RankTraining training(config, rank);
    training.take_step(batch_of_rank(config, rank.data));
    if (rank.world.rank() != 0) return;
    Counted counted;
    for (const auto& [kind, group] :
         {std::pair(GroupKind::kData, &rank.data), std::pair(GroupKind::kTensor, &rank.tensor),
          std::pair(GroupKind::kWorld, &rank.world)}) {
      if (group->size() == 1) continue;
      for (const OperationRing::Entry& entry : group->ring().entries()) {
        auto& [operations, bytes] =
            counted[{entry.name.substr(0, entry.name.find(" of bucket ")), kind}];
        ++operations;
        bytes += entry.bytes;
      }
      EXPECT_LE(group->ring().total_operations(), OperationRing::kCapacity) << "all were seen";
    }
    EXPECT_EQ(counted, expected);
  });
}

TEST(Plan, CommunicationIsWhatTheProcessGroupCounts) {
  for (const int ranks : {1, 2, 3}) {
    for (const char* const setting :
         {"train.zero_stage=0", "train.zero_stage=1", "train.zero_stage=2", "train.zero_stage=3",
          "train.invariant.shards=6", "train.optimizer={adafactor {}}", "train.optimizer={sgd {}}",
          "model.norm=post"}) {
      SCOPED_TRACE(testing::Message() << ranks << " ranks, " << setting);
      expect_exchanges(ranks, config_of({setting}));
    }
  }
}

TEST(Plan, CommunicationOfAMeshIsWhatTheProcessGroupsCount) {
  for (const int data : {1, 2}) {
    for (const std::string zero : {"train.zero_stage=1", "train.zero_stage=3"}) {
      for (const std::string recompute : {"train.recompute=false", "train.recompute=true"}) {
        SCOPED_TRACE(testing::Message() << data << " x 2, " << zero << ", " << recompute);
        expect_exchanges(data, config_of({zero, recompute, "mesh.tensor=2", "train.micro_batch=0",
                                          "train.bucket_elements=100000"}));
      }
    }
  }
}

// Slices inside nodes: values never leave a node, and of the gradients only sums of slices do.
TEST(Plan, SlicesInsideNodesSendOnlySumsToOtherNodes) {
  const configs::Config config = config_of({"train.zero_stage=3", "train.micro_batch=0",
                                            "mesh.ranks_per_node=2", "mesh.zero_inside_nodes=true",
                                            "train.bucket_elements=1000000", "model.channels=256"});
  for (const int ranks : {2, 4, 6}) {
    const RankState state = rank_state(config, kVocabulary, ranks);
    const int nodes = ranks / 2;
    std::map<std::pair<std::string, GroupKind>, Exchange> exchanges;
    for (const Exchange& each :
         exchanges_of(state.schedule, mesh_shape(config, ranks), /*ranks_per_node=*/2)) {
      exchanges[{each.what, each.group}] = each;
    }
    const auto gradients = static_cast<double>(state.gradients_bytes);  // of the slices
    EXPECT_EQ(exchanges.at({"values", GroupKind::kInsideNodes}).sent_to_other_nodes, 0);
    const Exchange& in_node = exchanges.at({"gradients", GroupKind::kInsideNodes});
    EXPECT_EQ(in_node.sent_to_other_nodes, 0);
    EXPECT_EQ(in_node.sent_bytes, gradients);
    if (nodes == 1) continue;
    const Exchange& between = exchanges.at({"gradients", GroupKind::kAcrossNodes});
    EXPECT_NEAR(between.sent_to_other_nodes, 2.0 * (nodes - 1) / nodes * gradients,
                1e-3 * gradients);
    EXPECT_EQ(between.sent_to_other_nodes, between.sent_bytes);
  }
}

// Layers are tried with a few ids of the vocabulary, of which each rank needs one.
TEST(Plan, KnowsModelsOverManyRanks) {
  PlanRequest request;
  request.config = config_of({"model.heads=32", "model.channels=64", "mesh.tensor=32",
                              "model.attention.0={group{mechanism{dense{}}}}",
                              "model.attention.1={group{mechanism{dense{}}}}"});
  request.vocabulary = kVocabulary;
  request.ranks = request.ranks_per_node = 32;
  EXPECT_GT(rank_memory(make_plan(request)), 0);
}

TEST(Plan, StateIsWhatARankAllocates) {
  for (const auto& [data, tensor] :
       {std::pair(1, 1), std::pair(2, 1), std::pair(2, 2), std::pair(1, 4)}) {
    for (const std::string setting :
         {"train.zero_stage=0", "train.zero_stage=1", "train.zero_stage=2", "train.zero_stage=3"}) {
      SCOPED_TRACE(testing::Message() << data << " x " << tensor << " ranks, " << setting);
      const configs::Config config =
          config_of({setting, "model.channels=128", "model.heads=8",
                     "model.attention.1.group.0.heads=4", "mesh.tensor=" + std::to_string(tensor)});
      const int ranks = data * tensor;
      const RankState state = rank_state(config, kVocabulary, ranks);
      PeakMemory memory(at::kCPU);
      memory.restart();
      run_mesh(data, tensor, [&](const MeshRank& rank) {
        const RankTraining training(config, rank);
        rank.world.barrier("all hold their state");
        if (rank.world.rank() == 0) {
          const auto predicted = static_cast<double>(state.values_bytes + state.gradients_bytes +
                                                     state.optimizer_bytes);
          EXPECT_NEAR(static_cast<double>(memory.live_bytes()) / (ranks * predicted), 1, 0.01);
        }
        rank.world.barrier("counted");
      });
    }
  }
}

double bytes_of_files(const fs::path& folder) {
  double bytes = 0;
  for (const auto& file : fs::recursive_directory_iterator(folder)) {
    if (file.is_regular_file()) bytes += static_cast<double>(file.file_size());
  }
  return bytes;
}

TEST(Plan, ACheckpointTakesThePredictedBytes) {
  for (const int ranks : {1, 3}) {
    for (const char* const setting :
         {"train.zero_stage=0", "train.zero_stage=1", "train.zero_stage=3"}) {
      const configs::Config config = config_of({setting});
      const SavedState saved = saved_state(config, kVocabulary, ranks);
      const TemporaryFolder folder;
      run_mesh(ranks, 1, [&](const MeshRank& rank) {
        RankTraining training(config, rank);
        CheckpointWriter writer(folder.path(), 1, {}, rank.world);
        CheckpointHeader header;
        header.set_run(std::string(32, 'a'));
        header.set_step(100);
        *header.mutable_config() = config;
        writer.save(header,
                    training_parts(*training.model, training.buckets, *training.optimizer, ranks));
        writer.finish();
      });
      EXPECT_NEAR(bytes_of_files(folder.path()) / static_cast<double>(saved.size.total()), 1, 0.005)
          << ranks << " ranks, " << setting;
      EXPECT_GE(ranks * saved.copy_bytes, saved.size.tensors);
    }
  }
}

// Ranks write and read what they hold: a copy of it for the writing thread, and little besides.
TEST(Plan, SavingAndLoadingTakeLittleMoreThanTheState) {
  for (const auto& [data, tensor] : {std::pair(2, 2), std::pair(1, 4)}) {
    const configs::Config config =
        config_of({"train.zero_stage=3", "train.bucket_elements=1000000", "model.channels=512",
                   "model.heads=8", "model.attention.1.group.0.heads=4",
                   "mesh.tensor=" + std::to_string(tensor)});
    const auto state =
        static_cast<double>(saved_state(config, kVocabulary, data * tensor).size.tensors);
    const TemporaryFolder folder;
    PeakMemory memory(at::kCPU);
    run_mesh(data, tensor, [&](const MeshRank& rank) {
      RankTraining training(config, rank);
      std::vector<TensorPart> parts =
          training_parts(*training.model, training.buckets, *training.optimizer, rank.world.size());
      CheckpointWriter writer(folder.path(), 1, {}, rank.world);
      CheckpointHeader header;
      header.set_run(std::string(32, 'a'));
      header.set_step(100);
      *header.mutable_config() = config;
      const auto expect_at_most = [&](double share, const char* what) {
        rank.world.barrier("done");
        if (rank.world.rank() == 0) {
          EXPECT_LE(static_cast<double>(memory.extra_bytes()), share * state) << what;
          memory.restart();
        }
        rank.world.barrier("counted");
      };
      rank.world.barrier("all hold their state");
      if (rank.world.rank() == 0) memory.restart();
      rank.world.barrier("counts");
      writer.save(header, parts);
      const auto saved = writer.finish();
      expect_at_most(1.2, "to save");
      load_checkpoint(open_checkpoint(*saved), parts);
      expect_at_most(0.2, "to load");
    });
  }
}

// ---- The command.

class PlanCommand : public testing::Test {
 protected:
  PlanCommand() { std::ofstream(file()) << kConfig; }
  std::string file() const { return folder_.path() + "/plan.txtpb"; }

  std::string plan(std::vector<std::string> arguments) const {
    arguments.insert(arguments.begin(), {"plan", file(), "--vocabulary", "70"});
    std::ostringstream out, err;
    EXPECT_EQ(run_app(arguments, out, err), 0) << err.str();
    EXPECT_EQ(err.str(), "");
    return out.str();
  }

 private:
  TemporaryFolder folder_;
};

TEST_F(PlanCommand, PartsAddUpToTheModelsParameters) {
  const auto json = nlohmann::json::parse(plan({"--json"}));
  std::int64_t sum = 0, total = 0;
  for (const auto& [part, values] : json["parameters"].items()) {
    const auto elements = values["elements"].get<std::int64_t>();
    (part == "total" ? total : sum) += part == "state_without_gradients" ? 0 : elements;
    EXPECT_TRUE(elements > 0 || part == "head") << part;
  }
  EXPECT_EQ(total, make_model(config_of(), kVocabulary, at::kCPU)->parameters().num_elements());
  EXPECT_EQ(sum, total);
}

TEST_F(PlanCommand, TotalMemoryIsThePeakOfTraining) {
  for (const char* const setting : {"model.channels=128", "train.recompute=true"}) {
    const auto memory = nlohmann::json::parse(plan({"--json", "--set", setting}))["memory"];
    const auto predicted = [&](const char* part) {
      return memory[part]["configured"].get<double>();
    };
    const configs::Config config = config_of({setting});
    const Batch batch = make_task(config)->synthetic_batch(kVocabulary, at::kCPU);
    PeakMemory counted(at::kCPU);
    counted.restart();
    const auto one = make_single_group();
    RankTraining training(config, {*one, *one, *one});
    for (int i = 0; i < 2; ++i) training.take_step(batch);
    EXPECT_NEAR((predicted("total") - predicted("batches") - predicted("copy_for_a_checkpoint")) /
                    static_cast<double>(counted.extra_bytes()),
                1, 0.03)
        << setting;
  }
}

TEST_F(PlanCommand, EveryTableIsInBothForms) {
  const std::vector<std::string> arguments = {
      "--ranks",           "4",     "--ranks-per-node", "2", "--peak-tflops",  "0.1",
      "--network-gbs",     "0.001", "--faults-per-day", "1", "--save-seconds", "2",
      "--restart-seconds", "60"};
  std::vector<std::string> with_json = arguments;
  with_json.push_back("--json");
  const std::string text = plan(arguments);
  const auto json = nlohmann::json::parse(plan(with_json));
  for (const char* const table : {"parameters", "memory", "computation", "communication",
                                  "checkpoint", "time", "speed", "effective_time"}) {
    EXPECT_TRUE(json.contains(table)) << table;
  }
  EXPECT_THAT(text, HasSubstr("| copy for a checkpoint |"));
  EXPECT_THAT(text, HasSubstr("| steps that count |"));
  const auto& memory = json["memory"];
  EXPECT_LT(memory["total"]["with_zero"], memory["total"]["configured"]);
  EXPECT_LT(memory["total"]["with_recompute"], memory["total"]["configured"]);
  // Two of the three ranks that each rank sends to are on the other node.
  const auto& sent = json["communication"]["total"];
  EXPECT_NEAR(sent["sent_to_other_nodes"].get<double>(), sent["sent_bytes"].get<double>() * 2 / 3,
              1e-6);
  EXPECT_GT(json["time"]["step"]["seconds"], json["time"]["forward"]["seconds"].get<double>() +
                                                 json["time"]["backward"]["seconds"].get<double>());
}

// Embedding, head and loss are not computed again.
TEST_F(PlanCommand, RecomputationRepeatsTheLayers) {
  const auto flops = [&](const char* pass, const std::string& setting) {
    const auto json = nlohmann::json::parse(plan({"--json", "--set", setting}));
    return json["computation"][pass]["flops"].get<double>();
  };
  const double of_first = flops("forward", "model.layers=3") - flops("forward", "model.layers=2"),
               layers = flops("forward", "model.layers=5") -
                        (flops("forward", "model.layers=1") - of_first);
  EXPECT_GT(of_first, 0);
  EXPECT_NEAR(
      flops("backward", "train.recompute=true") - flops("backward", "train.recompute=false"),
      layers, 1e-6 * layers);
}

TEST_F(PlanCommand, TheLastMicroBatchHidesTheNetwork) {
  const auto times = [&](const std::string& micro_batch) {
    return nlohmann::json::parse(
        plan({"--json", "--ranks", "2", "--ranks-per-node", "1", "--peak-tflops", "0.001",
              "--network-gbs", "0.00001", "--set", "train.micro_batch=" + micro_batch}))["time"];
  };
  const auto whole = times("0"), single = times("1");
  const auto seconds = [](const nlohmann::json& time, const char* part) {
    return time[part]["seconds"].get<double>();
  };
  const char* const network = "communication_not_hidden_by_computation";
  const double rows = static_cast<double>(config_of().train().global_batch()) / 2;
  ASSERT_GT(seconds(whole, network), 0);
  // Sending begins when the first bucket is full.
  const double hidden = seconds(single, network) - seconds(whole, network),
               others = seconds(whole, "backward") * (1 - 1 / rows);
  EXPECT_GT(hidden, 0.8 * others);
  EXPECT_LT(hidden, others);
}

// Two nodes of two ranks: the sums of a node leave it once, half by each rank.
TEST_F(PlanCommand, InTwoLevelsHalfOfTheGradientsLeaveANode) {
  const auto gradients = [&](const std::string& setting) {
    return nlohmann::json::parse(
        plan({"--json", "--ranks", "4", "--ranks-per-node", "2", "--set", setting, "--set",
              "train.bucket_elements=1000000"}))["communication"]["gradients"];
  };
  const auto levels = gradients("mesh.ranks_per_node=2"),
             direct = gradients("mesh.ranks_per_node=0");
  const double bytes = levels["bytes"].get<double>();
  EXPECT_EQ(direct["bytes"].get<double>(), bytes);
  EXPECT_NEAR(levels["sent_to_other_nodes"].get<double>(), bytes / 2, 1e-6);
  EXPECT_NEAR(direct["sent_to_other_nodes"].get<double>(), bytes, 1e-6);
  EXPECT_NEAR(levels["sent_bytes"].get<double>(), direct["sent_bytes"].get<double>(), 1e-6);
}

// In a ring one rank of a node sends to another node; directly, each sends to all others.
TEST_F(PlanCommand, WhatLeavesANodeDependsOnTheWayOfSending) {
  for (const bool ring : {false, true}) {
    const auto sent = nlohmann::json::parse(
        plan({"--json", "--ranks", "4", "--ranks-per-node", "2", "--set", "train.zero_stage=1",
              "--set", ring ? "device=cuda" : "device=cpu"}))["communication"];
    for (const char* const what : {"gradients", "values"}) {
      const bool in_ring = ring && what == std::string("values");
      EXPECT_NEAR(sent[what]["sent_to_other_nodes"].get<double>(),
                  sent[what]["sent_bytes"].get<double>() * (in_ring ? 1.0 / 2 : 2.0 / 3), 1e-6)
          << what << ring;
    }
  }
}

TEST_F(PlanCommand, ASliceIsUpdatedAlone) {
  const auto bytes = [&](const std::string& stage) {
    const auto json = nlohmann::json::parse(
        plan({"--json", "--ranks", "4", "--set", "train.zero_stage=" + stage}));
    return json["computation"]["optimizer"]["bytes"].get<double>();
  };
  EXPECT_NEAR(bytes("1") / bytes("0"), 0.25, 0.01);
}

TEST_F(PlanCommand, SaysWhatItDoesNotPredict) {
  EXPECT_THAT(plan({}), HasSubstr("The time of a step is not predicted: give --measure"));
  EXPECT_THAT(plan({"--ranks", "2", "--ranks-per-node", "1", "--peak-tflops", "1"}),
              HasSubstr("The time of the network is not predicted: give --network-gbs"));
  EXPECT_THAT(plan({"--ranks", "2", "--peak-tflops", "1", "--set", "device=cuda"}),
              HasSubstr("The time of transfers inside a node is not predicted: give --node-gbs"));
}

TEST_F(PlanCommand, TakesValuesWithoutEffectAndSaysSo) {
  EXPECT_THAT(plan({"--set", "train.schedule.shape=constant", "--set",
                    "train.schedule.final_learning_rate=1e-5"}),
              HasSubstr("Warning: train.schedule.final_learning_rate: 1e-05 has no effect"));
}

TEST_F(PlanCommand, SaysWhatItExtrapolates) {
  const std::vector<std::string> long_sequences = {"--set", "data.sequence_length=1048576", "--set",
                                                   "model.attention=[]", "--measure"};
  const std::string text = plan(long_sequences);
  EXPECT_THAT(text,
              HasSubstr("Memory is extrapolated from trials of up to 2 of 5 layers and 512 of "));
  EXPECT_THAT(text, HasSubstr("Times are extrapolated by FLOPs from steps of 1 of 5 layers"));
  std::vector<std::string> with_json = long_sequences;
  with_json.push_back("--json");
  EXPECT_THAT(nlohmann::json::parse(plan(with_json))["notes"].dump(),
              HasSubstr("Memory is extrapolated"));
  EXPECT_THAT(plan({}), testing::Not(HasSubstr("extrapolated")));
  // Parameters of one layer beyond what a plan may take.
  const std::string wide = plan({"--set", "model.channels=16384", "--measure"});
  EXPECT_THAT(wide, HasSubstr("Activations of the layers are estimated"));
  EXPECT_THAT(wide, HasSubstr("The time of a step is not predicted: give --peak-tflops"));
}

TEST_F(PlanCommand, NamesAttentionThatIsSlowOnTheDevice) {
  const std::string routing =
      "Attention: layers 1, 3, heads 0 to 1 (routing): attention over gathered rows takes a slower "
      "kernel, because the dtype is fp32, not bf16 or fp16.";
  const auto notes = [&](const std::vector<std::string>& arguments) {
    std::vector<std::string> all{"--json"};
    all.insert(all.end(), arguments.begin(), arguments.end());
    return nlohmann::json::parse(plan(all))["notes"].get<std::vector<std::string>>();
  };
  EXPECT_THAT(plan({}), testing::Not(HasSubstr("Attention:")));
  const std::string on_gpu = plan({"--set", "device=cuda"});
  EXPECT_THAT(on_gpu, HasSubstr(routing));
  EXPECT_THAT(on_gpu, HasSubstr("it may keep the scores of all pairs"));
  EXPECT_THAT(notes({"--set", "device=cuda"}), testing::Contains(routing));
  const std::vector<std::string> fused =
      notes({"--set", "device=cuda", "--set", "train.precision=bf16", "--set",
             "model.attention=[{ group { mechanism { dense {} } } }]"});
  EXPECT_THAT(fused, testing::Not(testing::Contains(HasSubstr("Attention:"))));
  EXPECT_THAT(fused, testing::Contains(HasSubstr("CPU's kernels: a GPU's kernels keep less, and")));
}

TEST_F(PlanCommand, MeasuresThisMachine) {
  const auto json = nlohmann::json::parse(plan({"--measure", "--json"}));
  EXPECT_GT(json["machine"]["FLOP_of_matrix_products"]["per_second"], 1e8);
  EXPECT_GT(json["speed"]["tokens"]["per_second"], 0);
  EXPECT_GT(json["time"]["optimizer"]["seconds"], 0);
}

}  // namespace
}  // namespace birkhoff
