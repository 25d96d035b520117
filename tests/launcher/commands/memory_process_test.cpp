// A Transformer-XL as users run it: kills and other numbers of ranks, contexts of evaluation, and
// generation.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <fstream>
#include <nlohmann/json.hpp>

#include "cluster/base/error.h"
#include "tests/launcher/bad_input/damage.h"
#include "tests/launcher/program_fixture.h"
#include "tests/launcher/training.h"

namespace birkhoff {
namespace {

using testing::HasSubstr;

constexpr char kConfig[] = R"(task { language_model {} }
data { corpus: "corpus" sequence_length: 8 }
model {
  layers: 2
  channels: 16
  heads: 2
  dropout { residual: 0.1 }
  attention { group { mechanism { dense { normalizer: top_k kept_keys: 8 } } } }
  positions: relative_sinusoidal
  memory { length: 20 }
}
train { steps: 60 global_batch: 12 schedule { learning_rate: 1e-2 warmup_steps: 5 } }
checkpoint { every: 10 }
evaluate { every: 20 micro_batch: 3 }
metrics { every: 1 }
watchdog { seconds: 60 }
)";

// The working directory holds `corpus` and `run`, a finished run.
class MemoryProcess : public ProgramTest {
 protected:
  static void SetUpTestSuite() {
    make_folder("birkhoff_memory");
    std::ofstream text("text.txt");
    for (unsigned i = 0; i < 6000; ++i) text << "abcdefgh ijklm\n"[i * i % 7 + i % 8];
    text.close();
    out_of({"prepare", "--out", "corpus", "--tokenizer", "chars", "--valid", "0.1", "text.txt"});
    std::ofstream("memory.txtpb") << kConfig;
    const Finished trained = birkhoff({"train", "memory.txtpb", "--run", "run"});
    ASSERT_EQ(trained.code, 0) << trained.err;
    EXPECT_THAT(trained.err, Not(HasSubstr("no kernels")));
  }
  static void TearDownTestSuite() { remove_folder(); }

  static Command train(const std::string& run, int ranks) {
    return {.line = birkhoff_line({"train", "memory.txtpb", "--run", run, "--ranks",
                                   std::to_string(ranks), "--set", "train.invariant.shards=6"})};
  }
  static nlohmann::json eval(std::vector<std::string> more) {
    more.insert(more.begin(), {"eval", "run", "--split", "valid", "--json"});
    return nlohmann::json::parse(out_of(more));
  }
};

// An epoch has 56 steps.
TEST_F(MemoryProcess, AKilledRunEndsWithTheSameBitsOnAnyNumberOfRanks) {
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

TEST_F(MemoryProcess, EvaluationIsTheSameOnAnyNumberOfRanksAndItsContextMatters) {
  const nlohmann::json one = eval({}), three = eval({"--ranks", "3"});
  EXPECT_EQ(one["loss"], three["loss"]);
  EXPECT_EQ(one["tokens"], three["tokens"]);
  for (const char* setting :
       {"model.memory.evaluation_length=4", "model.memory.evaluation_clamp=3",
        "model.memory.evaluation_same_length=true", "model.memory.evaluation_sequence_length=5",
        "evaluate.micro_batch=1"}) {
    const nlohmann::json other = eval({"--set", setting});
    EXPECT_EQ(other["tokens"], one["tokens"]) << setting;
    EXPECT_NE(other["loss"], one["loss"]) << setting;
  }
  expect_refused({"eval", "run", "--split", "valid", "--set", "evaluate.stride=4"},
                 ExitCode::kConfig, "must be 0 with model.memory.length");
}

TEST_F(MemoryProcess, TheLossOfADocumentIsWritten) {
  const nlohmann::json one = eval({"--documents", "one.jsonl"});
  eval({"--documents", "three.jsonl", "--ranks", "3"});
  const std::string written = read_bytes("one.jsonl");
  EXPECT_EQ(read_bytes("three.jsonl"), written);
  const nlohmann::json line = nlohmann::json::parse(written);  // the text is one document
  EXPECT_EQ(line["document"], 0);
  EXPECT_EQ(line["tokens"], one["tokens"]);
  EXPECT_NEAR(line["loss"], one["loss"].get<double>(), 1e-6);
  EXPECT_EQ(one["documents"], 1);
  EXPECT_EQ(one["loss_per_document"], line["loss"]);
  expect_refused({"eval", "run", "--documents", "nowhere/losses.jsonl"}, ExitCode::kUsage,
                 "--documents nowhere/losses.jsonl: is not the name of a file");
}

TEST_F(MemoryProcess, TextIsGeneratedAndScored) {
  EXPECT_GT(out_of({"sample", "run", "--prompt", "abc", "--tokens", "60"}).size(), 60u);
  // Longer than a sequence, but not than a sequence after a full memory.
  std::ofstream("texts.jsonl") << R"({"text": "abcdefgh abcdefgh ijk"})" << '\n';
  const auto scored = nlohmann::json::parse(out_of({"score", "run", "--input", "texts.jsonl"}));
  EXPECT_LT(scored["log_likelihood"].get<double>(), 0);
  EXPECT_GE(scored["tokens"], 20);  // of 21 characters
  EXPECT_THAT(out_of({"inspect", "run"}), HasSubstr("of other state"));
}

TEST_F(MemoryProcess, StepsAreMeasuredAndPlanned) {
  EXPECT_THAT(out_of({"bench", "step", "memory.txtpb", "--steps", "2"}),
              HasSubstr("sequences of 8 tokens"));
  const std::string slow = "softmax with dropout and sinusoidal distances has no kernels",
                    softmax = "model.attention.0.group.0.mechanism.dense={ dropout: ";
  EXPECT_THAT(out_of({"plan", "memory.txtpb", "--set", softmax + "0.1 }"}), HasSubstr(slow));
  const std::string any = "takes the reference path";
  EXPECT_THAT(out_of({"plan", "memory.txtpb", "--set", softmax + "0 }"}), Not(HasSubstr(any)));
  EXPECT_THAT(out_of({"plan", "memory.txtpb"}), Not(HasSubstr(any)));
}

TEST_F(MemoryProcess, OtherMechanismsAreRefused) {
  expect_refused({"train", "memory.txtpb", "--run", "new", "--set",
                  "model.attention.0.group.0.mechanism.sliding_window={ width: 4 }"},
                 ExitCode::kConfig, "relative_sinusoidal: not supported by this mechanism");
}

}  // namespace
}  // namespace birkhoff
