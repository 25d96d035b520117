// Models of pairs as users run them: training, kills and other numbers of ranks, evaluation, and
// what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "cluster/base/error.h"
#include "tests/launcher/program_fixture.h"
#include "tests/launcher/training.h"

namespace birkhoff {
namespace {

using testing::HasSubstr;

constexpr char kConfig[] = R"(task { translation {} }
data { corpus: "pairs" sequence_length: 8 }
model {
  layers: 1
  channels: 16
  heads: 2
  dropout { residual: 0.1 }
  attention { group { mechanism { sinkhorn { block: 4 } } } }
  encoder { attention { group { mechanism { sinkhorn { block: 4 } } } } }
}
train { steps: 60 global_batch: 12 schedule { learning_rate: 1e-2 warmup_steps: 5 } }
checkpoint { every: 10 }
evaluate { every: 20 micro_batch: 7 }
metrics { every: 1 }
watchdog { seconds: 60 }
)";

void write_lines(const std::string& file, const std::vector<std::string>& lines) {
  std::ofstream out(file);
  for (const std::string& line : lines) out << line << '\n';
}

// The working directory holds `pairs`, whose sides have a vocabulary each, `shared`, whose sides
// have one, and `run`, a finished run on the former.
class PairsProcess : public ProgramTest {
 protected:
  static void SetUpTestSuite() {
    make_folder("birkhoff_pairs");
    const std::vector<std::string> sources = {"a b c", "c b", "b a b c a a a a b c", "a"},
                                   targets = {"three two one", "x y", "one more time", "zwei"};
    for (const char* split : {"train", "valid"}) {
      write_lines(std::string(split) + ".source", sources);
      write_lines(std::string(split) + ".target", targets);
    }
    const std::vector<std::string> files = {
        "--train",      "train.source",   "--target",     "train.target", "--valid",
        "valid.source", "--valid-target", "valid.target", "--tokenizer",  "chars"};
    const auto prepare = [&](const std::string& out, const std::vector<std::string>& more) {
      std::vector<std::string> line = {"prepare", "--out", out};
      line.insert(line.end(), files.begin(), files.end());
      line.insert(line.end(), more.begin(), more.end());
      out_of(line);
    };
    prepare("pairs", {"--source-tokenizer", "chars"});
    prepare("shared", {});
    std::ofstream("pairs.txtpb") << kConfig;
    const Finished trained = birkhoff({"train", "pairs.txtpb", "--run", "run"});
    ASSERT_EQ(trained.code, 0) << trained.err;
    // Characters of a line are more than the 8 tokens that the model reads.
    EXPECT_THAT(trained.err, HasSubstr("pairs of split train are cut"));
  }
  static void TearDownTestSuite() { remove_folder(); }

  static Command train(const std::string& run, int ranks) {
    return {.line = birkhoff_line({"train", "pairs.txtpb", "--run", run, "--ranks",
                                   std::to_string(ranks), "--set", "train.invariant.shards=6"})};
  }
};

TEST_F(PairsProcess, AKilledRunEndsWithTheSameBitsOnAnyNumberOfRanks) {
  for (const int ranks : {1, 3}) {
    const Finished whole = run_child(train("whole" + std::to_string(ranks), ranks));
    ASSERT_EQ(whole.code, 0) << whole.err;
  }
  const auto tensors = final_tensors("whole1");
  EXPECT_FALSE(tensors.empty());
  EXPECT_TRUE(final_tensors("whole3") == tensors);
  EXPECT_NE(interrupt_at_step(train("moved", 3), "moved", 12,
                              [](Child&) { signal_rank("moved", 1, SIGKILL); }),
            0);
  const Finished moved = run_child(train("moved", 2));
  ASSERT_EQ(moved.code, 0) << moved.err;
  EXPECT_TRUE(final_tensors("moved") == tensors);
}

TEST_F(PairsProcess, CheckpointsHoldBothVocabularies) {
  const std::string shown = out_of({"inspect", "run"});
  EXPECT_THAT(shown, HasSubstr("sources      chars, "));
  EXPECT_THAT(shown, HasSubstr("sequences of 8 tokens and targets of 8"));
  EXPECT_THAT(shown, HasSubstr("encoder.embedding"));
  const auto result = nlohmann::json::parse(out_of({"eval", "run", "--split", "valid", "--json"}));
  for (const char* name : {"accuracy", "accuracy_per_sequence", "bits_per_byte"}) {
    EXPECT_TRUE(result.contains(name)) << result;
  }
  expect_refused({"eval", "run", "--corpus", "shared", "--split", "valid"}, ExitCode::kData,
                 "shared, stream 'source': its tokenizer (chars");
}

TEST_F(PairsProcess, StepsOfPairsAreMeasuredAndPlanned) {
  const auto plan =
      nlohmann::json::parse(out_of({"plan", "pairs.txtpb", "--json", "--measure", "--ranks", "2"}));
  for (const char* part : {"embedding", "attention", "feed-forward", "norms", "total"}) {
    EXPECT_GT(plan["parameters"][part]["elements"], 0) << part;
  }
  EXPECT_GT(plan["memory"]["activations_of_the_layers"]["configured"], 0);
  EXPECT_NEAR(plan["speed"]["tokens"]["per_second"].get<double>() /
                  plan["speed"]["steps"]["per_second"].get<double>(),
              12 * 16, 1e-6);
  EXPECT_GT(plan["communication"]["total"]["bytes"], 0);
  EXPECT_GT(plan["time"]["step"]["seconds"], 0) << plan.dump();
  EXPECT_THAT(out_of({"bench", "step", "pairs.txtpb", "--steps", "2"}),
              HasSubstr("sequences of 16 tokens"));
}

TEST_F(PairsProcess, RefusesWhatIsNotOfPairs) {
  expect_refused({"sample", "run", "--prompt", "one"}, ExitCode::kUsage, "generates no text");
  expect_refused({"analyse", "run", "--text", "train.source", "--html", "page.html"},
                 ExitCode::kUsage, "a model of pairs reads two texts");
  expect_refused({"eval", "run", "--text", "train.source"}, ExitCode::kUsage,
                 "predicts the targets of pairs");
  expect_refused(
      {"train", "pairs.txtpb", "--run", "new", "--set", "model.encoder.share_embedding=true"},
      ExitCode::kConfig, "the streams 'source' and 'target' of pairs have one each");
  expect_refused({"train", "pairs.txtpb", "--run", "new", "--set", "task.translation.source=words"},
                 ExitCode::kData, "words");
}

// The decoder finds the source: it copies it, symbol by symbol.
TEST_F(PairsProcess, AModelLearnsToCopy) {
  out_of({"prepare", "--out", "copies", "--generate", "copy", "--symbols", "6", "--train-length",
          "5", "--length", "5", "--samples", "4000", "--test-samples", "200"});
  out_of({"train", "pairs.txtpb", "--run", "copy", "--set", "data.corpus=copies", "--set",
          "model.channels=32", "--set", "train.steps=600", "--set", "train.global_batch=32",
          "--set", "model.dropout.residual=0", "--set", "evaluate.every=600", "--set",
          "model.encoder.share_embedding=true"});
  const auto result = nlohmann::json::parse(out_of({"eval", "copy", "--split", "test", "--json"}));
  EXPECT_GT(result.at("accuracy_per_sequence").get<double>(), 0.9) << result;
}

}  // namespace
}  // namespace birkhoff
