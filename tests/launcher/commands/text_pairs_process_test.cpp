// Classification of pairs of texts as users run it: from a table of two texts and a label to a
// model and its evaluations; class weights, and the end of training by evaluate.patience.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <nlohmann/json.hpp>
#include <random>

#include "tests/launcher/bad_input/damage.h"
#include "tests/launcher/child.h"
#include "tests/launcher/training.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;

const std::string kPairsConfig = BIRKHOFF_SOURCE_DIR "/configs/text_pairs_smoke.txtpb";

// The label is `yes` if both texts are good, which is so in a quarter of the rows. One text does
// not tell it.
std::string some_pairs(int rows, unsigned seed) {
  static const char* const kGood[] = {"fine", "warm", "bright"};
  static const char* const kBad[] = {"cold", "dull", "grey"};
  static const char* const kOther[] = {"the", "plot", "scene", "is", "a"};
  std::mt19937 random(seed);
  const auto text = [&](bool good) {
    std::string words;
    const unsigned length = 2 + random() % 8, place = random() % length;
    for (unsigned i = 0; i < length; ++i) {
      const char* word = i != place ? kOther[random() % std::size(kOther)]
                         : good     ? kGood[random() % std::size(kGood)]
                                    : kBad[random() % std::size(kBad)];
      words += (i == 0 ? "" : " ") + std::string(word);
    }
    return words;
  };
  std::string table = "label\tfirst\tsecond\n";
  for (int row = 0; row < rows; ++row) {
    const bool a = random() % 2 == 0, b = random() % 2 == 0;
    table += std::string(a && b ? "yes" : "no") + "\t" + text(a) + "\t" + text(b) + "\n";
  }
  return table;
}

class TextPairsProcess : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    setenv("OMP_NUM_THREADS", "1", 1);
    folder_ = new TemporaryFolder("birkhoff_text_pairs");
    fs::current_path(folder_->path());
    write_bytes("train.tsv", some_pairs(600, 1));
    write_bytes("valid.tsv", some_pairs(90, 2));
    run_well({"prepare", "--out", "corpus/mrpc", "--tokenizer", "words", "--text-column", "first",
              "--second-column", "second", "--label-column", "label", "--train", "train.tsv",
              "--valid", "valid.tsv"});
  }
  static void TearDownTestSuite() {
    fs::current_path("/");
    delete folder_;
  }

  static Finished run_well(const std::vector<std::string>& arguments) {
    const Finished finished = run_child({.line = birkhoff_line(arguments)});
    EXPECT_EQ(finished.code, 0) << finished.err;
    return finished;
  }
  static Finished train(const std::string& run, const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"train", kPairsConfig, "--run", run};
    for (const std::string& setting : more) arguments.insert(arguments.end(), {"--set", setting});
    return run_well(arguments);
  }

  static inline TemporaryFolder* folder_ = nullptr;
};

TEST_F(TextPairsProcess, BothPairModelsLearnFromBothTexts) {
  for (const std::string model : {"joined", "two_towers"}) {
    train(model, {"task.classification.pair_model=" + model, "model.layers=1", "train.steps=150",
                  "train.batch_tokens=512", "data.sequence_length=24", "evaluate.every=50",
                  "task.classification.class_weight=[1,3]"});
    const std::string alone = run_well({"eval", model, "--json"}).out;
    const auto figures = nlohmann::json::parse(alone);
    EXPECT_EQ(figures["sequences"], 90);
    EXPECT_GT(figures["accuracy"].get<double>(), 0.9) << model;
    EXPECT_LT(figures["majority_share"].get<double>(), 0.85) << "one text would do";
    EXPECT_EQ(run_well({"eval", model, "--json", "--ranks", "2"}).out, alone);
    const Finished refused = run_child({.line = birkhoff_line({"classify", model, "valid.tsv"})});
    EXPECT_EQ(refused.code, 2);
    EXPECT_THAT(refused.err, HasSubstr(model + ": the model reads pairs of texts"));
  }
  EXPECT_THAT(
      run_well({"plan", kPairsConfig, "--set", "task.classification.pair_model=two_towers"}).out,
      HasSubstr("| head | 512 |"));  // 2 classes, 4 x 64 channels
}

// Without learning, the first loss stays the lowest: evaluations at 10, 20 and 30.
TEST_F(TextPairsProcess, PatienceEndsTrainingOnAnyNumberOfRanks) {
  const auto arguments = [](const char* ranks, const char* patience) {
    return std::vector<std::string>{"train",   kPairsConfig,
                                    "--run",   "early",
                                    "--ranks", ranks,
                                    "--set",   "train.batch_tokens=0",
                                    "--set",   "train.global_batch=12",
                                    "--set",   "train.invariant.shards=12",
                                    "--set",   "train.steps=60",
                                    "--set",   "train.schedule.shape=constant",
                                    "--set",   "train.schedule.learning_rate=0",
                                    "--set",   "train.schedule.warmup_steps=0",
                                    "--set",   "data.sequence_length=24",
                                    "--set",   "model.layers=1",
                                    "--set",   "evaluate.every=10",
                                    "--set",   "checkpoint.every=10",
                                    "--set",   "checkpoint.keep_best=false",
                                    "--set",   std::string("evaluate.patience=") + patience};
  };
  const Finished first = run_well(arguments("2", "2"));
  EXPECT_THAT(first.err, AllOf(HasSubstr("step 30: the loss on valid was not below "),
                               HasSubstr("in 2 evaluations in a row: training ends here "
                                         "(evaluate.patience = 2)")));
  const auto tensors = final_tensors("early");
  EXPECT_THAT(checkpoint_names("early"), testing::Contains(HasSubstr("30")));
  EXPECT_THAT(run_well({"runs", "early"}).out, AllOf(HasSubstr("finished"), HasSubstr("30/60")));
  // As if it had been killed before the last save, then on another number of ranks.
  for (const std::string& name : checkpoint_names("early")) {
    if (name.find("30") != std::string::npos) fs::remove_all("early/checkpoints/" + name);
  }
  EXPECT_THAT(run_well({"runs", "early"}).out, HasSubstr("stopped"));
  run_well(arguments("1", "2"));
  EXPECT_TRUE(final_tensors("early") == tensors);
  EXPECT_THAT(run_well(arguments("1", "2")).err,
              HasSubstr("is at step 30, and the last 2 evaluations had no new lowest loss, and "
                        "evaluate.patience = 2: nothing to do; raise it to continue"));
  EXPECT_THAT(run_well(arguments("1", "3")).err, HasSubstr("step 40: the loss on valid"));
}

}  // namespace
}  // namespace birkhoff
