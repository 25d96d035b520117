// The reports of `prepare`, `train` and `eval` on text that a model does not know or does not
// predict.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <sstream>

#include "cluster/base/error.h"
#include "tests/launcher/bad_input/damage.h"
#include "tests/launcher/child.h"
#include "tests/launcher/training.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;
using testing::Not;

constexpr char kConfig[] = R"(task { language_model {} }
data { corpus: "corpus" sequence_length: 16 }
model { layers: 1 channels: 16 heads: 2 }
train { steps: 60 global_batch: 8 schedule { learning_rate: 1e-2 warmup_steps: 5 } }
checkpoint { every: 0 }
evaluate { every: 0 }
metrics { every: 1 tensorboard: false }
)";

class FiguresProcess : public testing::Test {
 protected:
  void SetUp() override {
    setenv("OMP_NUM_THREADS", "1", 1);
    fs::current_path(folder_.path());
    write_bytes("lm.txtpb", kConfig);
  }
  void TearDown() override { fs::current_path("/"); }

  static Finished run_line(const std::string& line) {
    return run_child({.line = birkhoff_line(split_line(line))});
  }
  static Finished run_well(const std::string& line) {
    Finished finished = run_line(line);
    EXPECT_EQ(finished.code, 0) << line << '\n' << finished.err;
    return finished;
  }
  static nlohmann::json eval(const std::string& arguments) {
    return nlohmann::json::parse(run_well("eval " + arguments + " --json").out);
  }
  static std::vector<nlohmann::json> metrics(const std::string& run) {
    std::vector<nlohmann::json> lines;
    std::istringstream text(read_bytes(run + "/metrics.jsonl"));
    for (std::string line; std::getline(text, line);) lines.push_back(nlohmann::json::parse(line));
    return lines;
  }

  // Words of which few are frequent.
  static std::string text(int count, unsigned seed) {
    std::mt19937 random(seed);
    std::vector<double> weights;
    for (int k = 1; k <= 2000; ++k) weights.push_back(1.0 / k);
    std::discrete_distribution<int> rank(weights.begin(), weights.end());
    std::string words;
    for (int i = 0; i < count; ++i)
      words += "w" + std::to_string(17 * rank(random)) + (i % 12 == 11 ? "\n" : " ");
    return words;
  }

  TemporaryFolder folder_{"birkhoff_figures"};
};

TEST_F(FiguresProcess, AModelThatKnowsFewWordsIsNeverBetter) {
  write_bytes("train.txt", text(20000, 1));
  write_bytes("valid.txt", text(2000, 2));
  double bits = std::numeric_limits<double>::infinity(), perplexity = bits;
  for (const std::string ids : {"30", "300", "3000"}) {
    const Finished prepared =
        run_well("prepare --out words" + ids + " --tokenizer words --vocab-size " + ids +
                 " --train train.txt --valid valid.txt");
    run_well("train lm.txtpb --run run" + ids + " --set data.corpus=words" + ids);
    const nlohmann::json figures = eval("run" + ids);
    EXPECT_LT(figures["bits_per_byte"], bits) << ids;
    EXPECT_LT(figures["word_perplexity"], perplexity) << ids;
    bits = figures["bits_per_byte"];
    perplexity = figures["word_perplexity"];
    EXPECT_GT(figures["unknown_tokens"], 0);
    // The first token of the split is counted, too, and no target.
    const auto said = [&](int more) {
      const int count = figures["unknown_tokens"].get<int>() + more;
      return HasSubstr("unknown tokens: " + std::to_string(count) + " (");
    };
    EXPECT_THAT(prepared.out, AnyOf(said(0), said(1)));
    EXPECT_THAT(run_well("inspect words" + ids).out, HasSubstr("unknown tokens: "));
    // The training log has the same figure.
    EXPECT_EQ(metrics("run" + ids).back()["bits_per_byte"], figures["bits_per_byte"]);
    // Printed, too.
    EXPECT_THAT(run_well("eval run" + ids).out,
                HasSubstr(figures["unknown_tokens"].dump() + " of them unknown ("));
  }
}

// The first tokens of documents that nothing predicts are neither targets nor bytes.
TEST_F(FiguresProcess, OnlyPredictedBytesCount) {
  write_bytes("one.txt", text(10, 0));
  for (unsigned i = 0; i < 40; ++i) {
    write_bytes("docs/" + std::to_string(i), text(20, i));
    write_bytes("held/" + std::to_string(i), text(1 + static_cast<int>(i % 3), 100 + i));
  }
  run_well("prepare --out one one.txt");
  run_well("prepare --out corpus --like one --train docs --valid held");
  run_well("train lm.txtpb --run run --set train.steps=4 --set data.restart_at_documents=true");
  for (const char* some : {"", " --sequences 3"}) {
    const nlohmann::json figures = eval(std::string("run") + some);
    EXPECT_EQ(figures["bytes"], figures["tokens"]);
    EXPECT_NEAR(figures["bits_per_byte"].get<double>(), figures["loss"].get<double>() / std::log(2),
                1e-9);
  }
}

TEST_F(FiguresProcess, NothingToPredictIsNotDivergence) {
  write_bytes("one.txt", text(10, 0));
  write_bytes("docs/long", text(40, 3));
  for (int i = 0; i < 60; ++i) write_bytes("docs/short" + std::to_string(i), "x");
  for (int i = 0; i < 3; ++i) write_bytes("held/" + std::to_string(i), "y");
  run_well("prepare --out one one.txt");
  run_well("prepare --out corpus --like one --train docs --valid held");
  const Finished trained = run_well(
      "train lm.txtpb --run run --set data.sequence_length=8 --set train.global_batch=1 --set "
      "train.steps=40 --set data.restart_at_documents=true");
  EXPECT_THAT(trained.err, AllOf(HasSubstr("nothing is evaluated"), HasSubstr("nothing to predict"),
                                 HasSubstr("no token of its batch is a target"),
                                 HasSubstr("no targets"), Not(HasSubstr("loss 0.0000"))));
  EXPECT_EQ(checkpoint_names("run"), std::vector<std::string>{"step-00000040"});
  int without = 0;
  for (const auto& line : metrics("run")) {
    without += line.contains("loss") ? 0 : 1;
    if (line.contains("loss")) {
      EXPECT_GT(line["loss"], 0);
    }
  }
  EXPECT_GT(without, 0);
  EXPECT_LT(without, 40);
  EXPECT_THAT(run_well("inspect run").out, Not(HasSubstr("best 0.0000")));
  EXPECT_THAT(run_well("runs run").out, Not(HasSubstr("diverged")));
  const Finished evaluated = run_line("eval run");
  EXPECT_EQ(evaluated.code, static_cast<int>(ExitCode::kData));
  EXPECT_THAT(evaluated.err, HasSubstr("nothing to predict"));
}

TEST_F(FiguresProcess, KeepBestSaysThatOtherLossesDoNotCompare) {
  write_bytes("text.txt", text(2000, 3));
  run_well("prepare --out corpus --valid 0.1 --test 0.1 text.txt");
  const std::string line =
      "train lm.txtpb --run run --set checkpoint.keep_best=true --set train.steps=";
  EXPECT_THAT(run_well(line + "2").err, Not(HasSubstr("do not compare")));
  EXPECT_THAT(run_well(line + "3").err, Not(HasSubstr("do not compare")));
  EXPECT_THAT(run_well(line + "4 --set evaluate.split=test").err,
              AllOf(HasSubstr("split valid -> split test"), HasSubstr("do not compare")));
}

// The command in the configuration's header, on files of WikiText's form: 267,735 ids and 245,569
// tokens come of counting like this. The published files are not in the tree.
TEST_F(FiguresProcess, WikiTextIsCountedAsPapersDo) {
  const fs::path configs = fs::path(BIRKHOFF_SOURCE_DIR) / "configs";
  const std::string header = read_bytes(configs / "routing_wikitext103_paper.txtpb");
  std::string command = header.substr(header.find("birkhoff prepare ") + 9);
  command = command.substr(0, command.find("wiki.test.tokens") + 16);
  for (std::size_t at; (at = command.find("\\\n#")) != std::string::npos;) command.erase(at, 3);
  const std::string unknown_heading = " \n = <unk> @-@ = \n \n";
  write_bytes("wiki.valid.tokens", unknown_heading + " w17 , <unk> 1 @,@ 000 w0 . \n");
  const std::string test = unknown_heading + " the w0 's <unk> ( w17 ) <eos> \n w0 \n \n";
  write_bytes("wiki.test.tokens", test);
  std::string train = text(3000, 4);
  for (std::size_t at = 0; (at = train.find('\n', at)) != std::string::npos; at += 3)
    train.replace(at, 1, " \n ");
  write_bytes("wiki.train.tokens",
              unknown_heading + " the w0 's <unk> ( w17 ) <eos> , 1 @,@ 000 w0 . " + train);

  std::set<std::string> words;
  std::istringstream all(read_bytes("wiki.train.tokens"));
  for (std::string word; all >> word;) words.insert(word);
  const std::string ids = std::to_string(words.size() + 1);  // and the line end
  const Finished prepared = run_well(command);
  EXPECT_THAT(prepared.out, HasSubstr("whitespace, " + ids + " ids\n"));
  EXPECT_THAT(prepared.out,
              AllOf(HasSubstr("unknown tokens: 0 (0 %)"), Not(HasSubstr("unknown tokens: 1"))));
  // By hand: 4 + 8 + 1 words and 6 line ends, of which the first is no target.
  const Finished trained =
      run_well("train " + (configs / "routing_wikitext103_smoke.txtpb").string() +
               " --run run --set train.steps=1 --set train.global_batch=1");
  EXPECT_THAT(trained.err, HasSubstr("no bits per byte: the tokenizer does not keep white space"));
  EXPECT_FALSE(metrics("run").back().contains("bits_per_byte"));
  const nlohmann::json figures = eval("run --split test");
  EXPECT_EQ(figures["words"], 13);
  EXPECT_EQ(figures["line_ends"], 5);
  EXPECT_EQ(figures["tokens"], 18);
  EXPECT_EQ(figures["unknown_tokens"], 0);
  EXPECT_THAT(figures["withheld"], HasSubstr("white space"));
  const double nats = figures["loss"].get<double>() * 18;
  EXPECT_NEAR(std::log(figures["word_perplexity"].get<double>()), nats / 13, 1e-9);
  EXPECT_NEAR(std::log(figures["word_and_line_perplexity"].get<double>()), nats / 18, 1e-9);
  EXPECT_DOUBLE_EQ(figures["word_and_line_perplexity"], figures["perplexity"]);
}

}  // namespace
}  // namespace birkhoff
