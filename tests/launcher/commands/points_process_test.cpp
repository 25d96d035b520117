// Classifiers of point sets as users run them: training, evaluation, another number of ranks, and
// what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>

#include "cluster/base/error.h"
#include "tests/data/images/image_corpus.h"
#include "tests/data/point_corpus.h"
#include "tests/data/points/point_files.h"
#include "tests/launcher/bad_input/damage.h"
#include "tests/launcher/program_fixture.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

// Two layers in which every point attends to every point.
constexpr char kSets[] = R"(task {
  point_sets { classes: 4 dimensions: 2 scaling: as_stored set_transformer { inducing_points: 0 } }
}
data { corpus: "sets" sequence_length: 16 }
model {
  layers: 2
  channels: 64
  heads: 4
  attention { group { mechanism { sinkformer { half_steps: 3 } } } }
  bias: true
  init: uniform_unit_scaling
}
train {
  steps: 400
  global_batch: 32
  optimizer { adamw { weight_decay: 0 } }
  schedule { learning_rate: 3e-3 warmup_steps: 40 }
  invariant { shards: 2 }
}
checkpoint { every: 200 }
evaluate { every: 400 }
metrics { every: 100 }
)";

// The working directory holds a corpus of sets of 16 points in 2 dimensions, and a run.
class PointsProcess : public ProgramTest {
 protected:
  static void SetUpTestSuite() {
    make_folder("birkhoff_points");
    write_cluster_sets("sets", {.points = 16, .dimensions = 2, .train = 6000, .valid = 400});
    write_cluster_sets("solid", {.points = 16, .dimensions = 3, .train = 8, .valid = 8});
    write_cluster_sets("few", {.points = 4, .dimensions = 2, .train = 8, .valid = 8});
    write_images("images", {6, 4, 3});
    std::ofstream("sets.txtpb") << kSets;
    const Finished trained = birkhoff({"train", "sets.txtpb", "--run", "run"});
    ASSERT_EQ(trained.code, 0) << trained.err;
  }
  static void TearDownTestSuite() { remove_folder(); }
};

// A classifier that sees one point of a set is right in a quarter of cases, however it is trained,
// because a single point says nothing about which of the 4 classes the set has.
TEST_F(PointsProcess, CountsClusters) {
  EXPECT_THAT(out_of({"eval", "run"}), HasSubstr(" nats per set, "));
  const auto figures = nlohmann::json::parse(out_of({"eval", "run", "--json"}));
  EXPECT_GE(figures.at("accuracy").get<double>(), 0.8);
  EXPECT_EQ(out_of({"eval", "run", "--json", "--ranks", "2"}), out_of({"eval", "run", "--json"}));
  EXPECT_THAT(out_of({"inspect", "run"}), HasSubstr("pooling.seeds"));
  EXPECT_THAT(out_of({"verify", "run"}), HasSubstr("checkpoint verified"));
}

TEST_F(PointsProcess, GoesOnWithTheSameBitsOnMoreRanks) {
  const auto part = [](const std::string& run, const std::string& ranks, const std::string& steps) {
    out_of({"train", "sets.txtpb", "--run", run, "--ranks", ranks, "--set", "train.steps=" + steps,
            "--set", "train.schedule.shape=constant"});
  };
  part("whole", "1", "40");
  part("parts", "1", "20");
  part("parts", "2", "40");
  const auto parts = nlohmann::json::parse(out_of({"eval", "parts", "--json"})),
             whole = nlohmann::json::parse(out_of({"eval", "whole", "--json"}));
  for (const char* figure : {"loss", "accuracy"}) EXPECT_EQ(parts.at(figure), whole.at(figure));
}

TEST_F(PointsProcess, WarnsOfAPoolingThatIsAMean) {
  const Finished trained =
      birkhoff({"train", "sets.txtpb", "--run", "mean", "--set", "train.steps=2", "--set",
                "task.point_sets.set_transformer.pooling_attention=as_layers"});
  EXPECT_EQ(trained.code, 0) << trained.err;
  EXPECT_THAT(trained.out + trained.err,
              HasSubstr("doubly stochastic attention gives all points the same weight"));
}

// PCT on 16 points, of which 8 and 4 are kept.
std::vector<std::string> train_pct(const std::string& run, const std::string& steps,
                                   const std::vector<std::string>& more = {}) {
  std::vector<std::string> line = {"train", "pct.txtpb", "--run",
                                   run,     "--set",     "train.steps=" + steps};
  line.insert(line.end(), more.begin(), more.end());
  return line;
}

void write_pct() {
  std::ofstream("pct.txtpb") << R"(task {
  point_sets {
    classes: 4
    dimensions: 2
    scaling: as_stored
    point_cloud_transformer { neighbors: 4 half_steps: 4 dropout: 0.1 }
  }
}
data { corpus: "sets" sequence_length: 16 }
model { layers: 2 channels: 32 bias: true init: uniform_unit_scaling }
train {
  global_batch: 32
  optimizer { sgd { weight_decay: 0 } }
  schedule { learning_rate: 0.05 warmup_steps: 0 shape: constant }
}
checkpoint { every: 100 }
evaluate { every: 0 }
metrics { every: 100 }
)";
}

TEST_F(PointsProcess, PctCountsClusters) {
  write_pct();
  out_of(train_pct("pct", "300"));
  const auto figures = nlohmann::json::parse(out_of({"eval", "pct", "--json"}));
  EXPECT_GE(figures.at("accuracy").get<double>(), 0.8);
  EXPECT_EQ(out_of({"eval", "pct", "--json", "--ranks", "2"}), out_of({"eval", "pct", "--json"}));
  EXPECT_THAT(out_of({"inspect", "pct"}), HasSubstr("running means"));
  // Trained further on two ranks.
  out_of(train_pct("pct", "302", {"--ranks", "2"}));
  EXPECT_THAT(out_of({"verify", "pct"}), HasSubstr("checkpoint verified"));
  EXPECT_THAT(out_of({"plan", "pct.txtpb", "--ranks", "2"}), HasSubstr("gradient of batch norm"));
  expect_refused(train_pct("refused", "2", {"--set", "train.micro_batch=8"}), ExitCode::kConfig,
                 "train.micro_batch: must be 0 with batch norms");
}

// Ranks whose passes communicate give up a step together.
TEST_F(PointsProcess, AStoppedPctContinuesWithTheSameBits) {
  write_pct();
  out_of(train_pct("pct_whole", "400", {"--ranks", "2"}));
  const auto whole = nlohmann::json::parse(out_of({"eval", "pct_whole", "--json"}));
  int stopped = 0;
  for (const int milliseconds : {1500, 2500, 4000}) {
    const std::string run = "pct_stopped" + std::to_string(milliseconds);
    const auto line = train_pct(run, "400", {"--ranks", "2"});
    Child child({.line = birkhoff_line(line)});
    std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
    child.signal(SIGTERM);
    const Finished finished = child.finish();
    EXPECT_THAT(finished.code, testing::AnyOf(0, 75)) << finished.err;
    stopped += finished.code == 75;
    out_of(line);
    const auto ours = nlohmann::json::parse(out_of({"eval", run, "--json"}));
    for (const char* figure : {"step", "loss", "accuracy"})
      EXPECT_EQ(ours.at(figure), whole.at(figure)) << milliseconds;
  }
  EXPECT_GT(stopped, 0);
}

// Not on threads as ranks: a child that reads HDF5 must not begin while another thread writes it.
TEST_F(PointsProcess, RanksPrepareTheSameBytes) {
  constexpr int kRows = 70'000;  // two shards
  std::vector<std::uint8_t> labels(kRows, 3);
  std::fill(labels.begin() + 1000, labels.end(), 5);
  write_bytes("in/a.h5", modelnet_of(point_values(kRows, 1, 2), 1, 2, labels));
  const auto prepare = [](const char* out, const std::vector<std::string>& more) {
    std::vector<std::string> line = {"prepare", "--points", "--valid", "0", "--out", out, "in"};
    line.insert(line.end(), more.begin(), more.end());
    const Finished prepared = birkhoff(line);
    EXPECT_EQ(prepared.code, 0) << prepared.err;
    std::map<std::string, std::string> files;
    for (const auto& file : fs::directory_iterator(out))
      files[file.path().filename().string()] = read_bytes(file.path());
    return files;
  };
  const auto expected = prepare("prepared", {});
  EXPECT_EQ(expected.size(), 5u);
  EXPECT_TRUE(prepare("prepared_on_ranks", {"--ranks", "2"}) == expected);
}

TEST_F(PointsProcess, RefusalsAreOneLine) {
  const auto usage = ExitCode::kUsage, data = ExitCode::kData, config = ExitCode::kConfig;
  const auto train = [](const std::string& setting) {
    return std::vector<std::string>{"train", "sets.txtpb", "--run", "refused", "--set", setting};
  };
  expect_refused(train("data.sequence_length=17"), data,
                 "sets: record 'points' of split 'train' has sets of 16 points, but "
                 "data.sequence_length is 17; set it to at most 16");
  expect_refused(train("data.corpus=solid"), data,
                 "solid: record 'points' of split 'train' has points of 3 coordinates, but "
                 "task.point_sets.dimensions is 2; set it to 3");
  expect_refused(train("data.corpus=images"), config, "task.point_sets.classes: is 4");
  expect_refused(
      train("task.point_sets.points=label"), data,
      "record 'label' of split 'train' is u16 [], not point sets, which are f32 [points, "
      "dimensions]; name a record of point sets in task.point_sets.points");
  expect_refused(train("task.point_sets.label=points"), data,
                 "the corpus' record 'points' holds no labels; set task.point_sets.label to one "
                 "that does");
  expect_refused(train("task.point_sets.classes=5"), config,
                 "task.point_sets.classes: is 5, but the corpus has 4 classes for its label "
                 "'label'; set it to 4");
  expect_refused(train("mesh.tensor=2"), config, "mesh.tensor: must be 1 with task.point_sets");
  expect_refused(train("model.attention.0={ group { mechanism { sliding_window { width: 4 } } } }"),
                 config, "choose dense or sinkformer");
  expect_refused(train("model.positions=sinusoidal"), config,
                 "has no effect if task is point_sets");
  expect_refused({"eval", "run", "--corpus", "few"}, data,
                 "few: record 'points' of split 'valid' has sets of 4 points");
  expect_refused({"eval", "run", "--corpus", "images"}, data, "label");
  expect_refused({"eval", "run", "--text", "sets.txtpb"}, usage, "the model predicts no text");
  expect_refused({"classify", "run", "sets.txtpb"}, usage, "no tokenizer");
  expect_refused({"sample", "run", "--png", "a.png"}, usage,
                 "run: a model of this task generates no images");
}

TEST_F(PointsProcess, PlansAndBenchmarksNeedNoCorpus) {
  EXPECT_THAT(out_of({"plan", "sets.txtpb", "--set", "data.corpus=''", "--ranks", "2"}),
              HasSubstr("Parameters of the model."));
  EXPECT_THAT(out_of({"bench", "step", "sets.txtpb", "--set", "data.corpus=''", "--steps", "2",
                      "--set", "train.invariant.shards=0"}),
              HasSubstr("forward"));
}

}  // namespace
}  // namespace birkhoff
