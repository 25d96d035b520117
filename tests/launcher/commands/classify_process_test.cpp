// Text classification as users run it: from a table of texts and labels to trained models,
// evaluations and the classes of new texts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>

#include "tests/launcher/bad_input/damage.h"
#include "tests/launcher/child.h"
#include "tests/launcher/pipe_ends.h"
#include "tests/launcher/training.h"
#include "tests/sample_data.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;

constexpr int kTestTexts = 45;

constexpr char kConfig[] = R"(task { classification {} }
data { corpus: "corpus" sequence_length: 16 }
model {
  layers: 1
  channels: 16
  heads: 2
  dropout { embedding: 0.1 residual: 0.1 }
  attention { group { mechanism { sinkhorn { block: 4 dropout: 0.1 } } } }
}
train {
  steps: 40
  global_batch: 12
  schedule { learning_rate: 1e-2 warmup_steps: 5 }
}
checkpoint { every: 10 }
evaluate { every: 10 micro_batch: 8 }
metrics { every: 1 }
watchdog { seconds: 60 }
)";

// A table: a text is `good` if it has more of the words fine, warm and bright than of cold, dull
// and grey; some texts are longer than the model reads.
std::string some_reviews(int rows, unsigned seed) {
  static const char* const kWords[] = {"fine", "warm", "bright", "cold", "dull", "grey",
                                       "the",  "plot", "scene",  "is",   "a"};
  std::mt19937 random(seed);
  std::string table = "id\tmood\treview\n";
  for (int row = 0; row < rows; ++row) {
    int mood = 0;
    std::string text;
    while (mood == 0 || random() % 6 != 0) {
      const unsigned word = random() % std::size(kWords);
      mood += word < 3 ? 1 : word < 6 ? -1 : 0;
      text += (text.empty() ? "" : " ") + std::string(kWords[word]);
    }
    table += std::to_string(row) + (mood > 0 ? "\tgood\t" : "\tbad\t") + text + "\n";
  }
  return table;
}

std::string column(const std::string& table, int number) {
  std::string values;
  std::istringstream lines(table);
  std::string line;
  for (std::getline(lines, line); std::getline(lines, line);) {
    std::istringstream cells(line);
    std::string cell;
    for (int i = 0; i < number; ++i) std::getline(cells, cell, '\t');
    values += cell + "\n";
  }
  return values;
}

// The working directory holds tables, `corpus`, sent.txtpb and `run`, a finished run.
class ClassifyProcess : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    setenv("OMP_NUM_THREADS", "1", 1);
    folder_ = new TemporaryFolder("birkhoff_classify");
    fs::current_path(folder_->path());
    write_bytes("train.tsv", some_reviews(400, 1));
    write_bytes("valid.tsv", some_reviews(60, 2));
    write_bytes("test.tsv", some_reviews(kTestTexts, 3));
    write_bytes("sent.txtpb", kConfig);
    run_well({"prepare", "--out", "corpus", "--tokenizer", "words", "--text-column", "review",
              "--label-column", "mood", "--train", "train.tsv", "--valid", "valid.tsv", "--test",
              "test.tsv"});
    run_well({"train", "sent.txtpb", "--run", "run", "--set", "train.steps=150"});
  }
  static void TearDownTestSuite() {
    fs::current_path("/");
    delete folder_;
  }

  static Finished run_well(const std::vector<std::string>& arguments,
                           const std::string& input = "/dev/null") {
    Command command{.line = birkhoff_line(arguments)};
    command.input = input;
    const Finished finished = run_child(command);
    EXPECT_EQ(finished.code, 0) << finished.err;
    return finished;
  }

  static Command train(const std::string& name, int ranks,
                       const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments = {"train", "sent.txtpb", "--run",
                                          name,    "--ranks",    std::to_string(ranks)};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return {.line = birkhoff_line(arguments)};
  }

  static std::string test_texts() { return column(some_reviews(kTestTexts, 3), 3); }

  static inline TemporaryFolder* folder_ = nullptr;
};

const std::vector<std::string> kInvariant = {"--set", "train.invariant.shards=12"};

TEST_F(ClassifyProcess, RanksTrainAndResumeWithTheSameBits) {
  for (const int ranks : {1, 2, 3}) {
    const Finished finished = run_child(train("ranks" + std::to_string(ranks), ranks, kInvariant));
    ASSERT_EQ(finished.code, 0) << finished.err;
  }
  const MetricsLines expected = lines_of_metrics("ranks1", Predicts::kLabels);
  EXPECT_EQ(expected.steps.size(), 40U);
  EXPECT_EQ(expected.evaluated, (std::vector<int>{10, 20, 30, 40}));
  const auto tensors = final_tensors("ranks1");
  ASSERT_GT(tensors.size(), 10U);
  for (const char* other : {"ranks2", "ranks3"}) {
    EXPECT_EQ(lines_of_metrics(other, Predicts::kLabels).figures, expected.figures) << other;
    EXPECT_TRUE(final_tensors(other) == tensors) << other;
  }

  // A rank is killed; then a signal stops another number of ranks; then the run ends on a third.
  EXPECT_NE(interrupt_at_step(train("moved", 3, kInvariant), "moved", 12,
                              [](Child&) { signal_rank("moved", 1, SIGKILL); }),
            0);
  EXPECT_EQ(interrupt_at_step(train("moved", 2, kInvariant), "moved", 22,
                              [](Child& child) { child.signal(SIGTERM); }),
            75);
  const Finished finished = run_child(train("moved", 1, kInvariant));
  ASSERT_EQ(finished.code, 0) << finished.err;
  EXPECT_EQ(lines_of_metrics("moved", Predicts::kLabels).figures, expected.figures);
  EXPECT_TRUE(final_tensors("moved") == tensors);
}

TEST_F(ClassifyProcess, EvalPrintsTheSameFiguresOnAnyNumberOfRanks) {
  const std::string alone = run_well({"eval", "run", "--split", "test", "--json"}).out;
  const auto figures = nlohmann::json::parse(alone);
  EXPECT_EQ(figures["sequences"], kTestTexts);
  EXPECT_GT(figures["accuracy"], 0.9) << "the classes are easy";
  EXPECT_FALSE(figures.contains("bits_per_byte"));
  EXPECT_FALSE(figures.contains("perplexity"));
  for (const char* ranks : {"1", "2", "3"}) {
    EXPECT_EQ(run_well({"eval", "run", "--split", "test", "--json", "--ranks", ranks}).out, alone)
        << ranks << " ranks";
  }
  EXPECT_THAT(run_well({"eval", "run", "--split", "test"}).out,
              AllOf(HasSubstr("nats per sequence, "),
                    testing::AnyOf(HasSubstr("45 of 45 sequences\naccuracy 0.9"),
                                   HasSubstr("45 of 45 sequences\naccuracy 1\n")),
                    testing::Not(HasSubstr("byte"))));
}

TEST_F(ClassifyProcess, PredictsTheClassesThatEvalCounts) {
  write_bytes("texts.txt", test_texts());
  const Finished finished = run_well({"classify", "run", "texts.txt"});
  std::istringstream predicted(finished.out), labels(column(some_reviews(kTestTexts, 3), 2));
  std::map<std::string, std::map<std::string, int>> confusion;  // by label and prediction
  int correct = 0, rows = 0;
  std::string line, label;
  for (; std::getline(predicted, line) && std::getline(labels, label); ++rows) {
    const std::size_t tab = line.find('\t');
    correct += line.substr(0, tab) == label;
    ++confusion[label][line.substr(0, tab)];
    const double probability = std::stod(line.substr(tab + 1));
    EXPECT_TRUE(probability >= 0.5 && probability <= 1) << line;
  }
  EXPECT_EQ(rows, kTestTexts);
  const auto figures =
      nlohmann::json::parse(run_well({"eval", "run", "--split", "test", "--json"}).out);
  EXPECT_NEAR(figures["accuracy"].get<double>() * kTestTexts, correct, 1e-9);
  double macro_f1 = 0;
  const std::vector<std::string> names = {"bad", "good"};
  for (std::size_t k = 0; k < 2; ++k) {
    const std::string &name = names[k], &other = names[1 - k];
    const int samples = confusion[name][name] + confusion[name][other],
              predictions = confusion[name][name] + confusion[other][name];
    const nlohmann::json scores = figures["classes"][k];
    EXPECT_EQ(scores["name"], name);
    EXPECT_EQ(scores["samples"], samples);
    EXPECT_EQ(scores["predictions"], predictions);
    EXPECT_EQ(scores["correct"], confusion[name][name]);
    EXPECT_EQ(figures["confusion"][k][k], confusion[name][name]);
    EXPECT_EQ(figures["confusion"][k][1 - k], confusion[name][other]);
    const double f1 = 2.0 * confusion[name][name] / (samples + predictions);
    EXPECT_NEAR(scores["f1"].get<double>(), f1, 1e-15);
    macro_f1 += f1 / 2;
    if (figures["majority_class"] == name) {
      EXPECT_GE(2 * samples, kTestTexts);
      EXPECT_NEAR(figures["majority_share"].get<double>(), 1.0 * samples / kTestTexts, 1e-15);
      EXPECT_THAT(run_well({"eval", "run", "--split", "test"}).out,
                  AllOf(HasSubstr(", majority class " + name + " "), HasSubstr(", macro F1 "),
                        HasSubstr("| class | samples | F1 | predicted bad | predicted good |\n"),
                        HasSubstr("| " + name + " | " + std::to_string(samples) + " | ")));
    }
  }
  EXPECT_NEAR(figures["macro_f1"].get<double>(), macro_f1, 1e-15);
  EXPECT_THAT(finished.err,
              testing::ContainsRegex("[0-9]+ texts were cut to the model's data.sequence_length = "
                                     "16 tokens"));

  // A text has the same class if standard input holds only this text, without a line feed.
  const std::string all = run_well({"classify", "run", "texts.txt", "--json"}).out;
  const std::string first = test_texts().substr(0, test_texts().find('\n'));
  write_bytes("one.txt", first);
  const auto alone =
      nlohmann::json::parse(run_well({"classify", "run", "-", "--json"}, "one.txt").out);
  const auto among = nlohmann::json::parse(all.substr(0, all.find('\n')));
  EXPECT_EQ(alone["text"], first);
  EXPECT_EQ(alone["class"], among["class"]);
  EXPECT_NEAR(alone["probability"].get<double>(), among["probability"].get<double>(), 1e-5);
  EXPECT_NEAR(
      alone["probabilities"]["bad"].get<double>() + alone["probabilities"]["good"].get<double>(), 1,
      1e-6);
}

TEST_F(ClassifyProcess, LabelledTextTrainsLanguageModelsToo) {
  const std::string config =
      "task { language_model {} } data { corpus: 'corpus' sequence_length: 16 }"
      " model { layers: 1 channels: 16 heads: 2 } train { steps: 3 }";
  write_bytes("language.txtpb", config);
  run_well({"train", "language.txtpb", "--run", "language"});
  EXPECT_THAT(run_well({"eval", "language"}).out, HasSubstr("bits per byte"));
  const Finished refused = run_child({.line = birkhoff_line({"classify", "language", "one.txt"})});
  EXPECT_EQ(refused.code, 2);
  EXPECT_THAT(refused.err, HasSubstr("language: a model of this task has no classes"));
}

struct Refusal {
  std::string name;
  std::vector<std::string> arguments;
  int code;
  std::string message;
};

TEST_F(ClassifyProcess, RefusesInOneLine) {
  const auto prepare_table = [](const std::string& out, const std::string& table) {
    write_bytes(out + ".tsv", table);
    run_well({"prepare", "--out", out, "--tokenizer", "words", "--text-column", "1",
              "--label-column", "2", "--valid", "0.3", out + ".tsv"});
  };
  prepare_table("three", "the plot\tx\nthe scene\ty\na plot\tz\nis warm\tz\nis fine\tx\nis a\ty\n");
  // The model's tokenizer, but labels in another order.
  for (const char* name : {"moods.tsv", "more_moods.tsv"})
    write_bytes(name, "the plot\tzzz\nthe scene\taaa\n");
  run_well({"prepare", "--out", "moods", "--tokenizer", "corpus/tokenizer.words", "--text-column",
            "1", "--label-column", "2", "--train", "moods.tsv", "--valid", "more_moods.tsv"});
  write_bytes("plain.txt", "the plot is warm\nthe scene is grey\n");
  run_well({"prepare", "--out", "plain", "--like", "run", "--valid", "0", "plain.txt"});
  write_bytes("empty_line.txt", "warm\n\ncold\n");
  write_bytes("latin.txt", "caf\xe9\n");
  write_bytes("long_line.txt", std::string(2 << 20, 'a'));
  write_bytes("unknown.tsv", "warm\tlukewarm\ncold\tbad\n");
  const std::vector<Refusal> refusals = {
      {"classes",
       {"train", "sent.txtpb", "--run", "new", "--set", "data.corpus=three"},
       3,
       "task.classification.classes: is 2, but the corpus has 3 classes for its label 'label'; set "
       "it to 3"},
      {"no record",
       {"train", "sent.txtpb", "--run", "new", "--set", "data.corpus=plain"},
       4,
       "plain: split 'train' has no record 'label'; it has: none; birkhoff prepare makes records of "
       "labels (--label-column)"},
      {"name of the record",
       {"train", "sent.txtpb", "--run", "new", "--set", "task.classification.label=mood"},
       4,
       "'mood'"},
      {"documents",
       {"train", "sent.txtpb", "--run", "new", "--set", "data.restart_at_documents=true"},
       3,
       "data.restart_at_documents: true has no effect unless task is language_model"},
      {"other pooling",
       {"train", "sent.txtpb", "--run", "run", "--set", "train.steps=200", "--set",
        "task.classification.pooling=first"},
       3,
       "task.classification.pooling: mean -> first"},
      {"eval --text", {"eval", "run", "--text", "plain.txt"}, 2, "birkhoff classify run plain.txt"},
      {"eval of other classes", {"eval", "run", "--corpus", "three"}, 4, "three: its tokenizer"},
      {"eval of other labels",
       {"eval", "run", "--corpus", "moods"},
       4,
       "moods: the classes of its labels, 2 classes (aaa, zzz), are not the model's, 2 "
       "classes (bad, good); prepare its table like the model's: birkhoff prepare --out NEW --like "
       "run"},
      {"sample", {"sample", "run", "--prompt", "warm"}, 2, "generates no text"},
      {"missing file", {"classify", "run", "missing.txt"}, 2, "missing.txt"},
      {"folder", {"classify", "run", "corpus"}, 2, "corpus"},
      {"corpus", {"classify", "corpus", "plain.txt"}, 2, "is a corpus; name a run folder"},
      {"empty line",
       {"classify", "run", "empty_line.txt"},
       4,
       "empty_line.txt:2: the line is empty"},
      {"table",
       {"classify", "run", "test.tsv"},
       4,
       "test.tsv:1: the line holds a tab: is this a table? Give one column of it, without its "
       "header: tail -n +2 test.tsv | cut -f COLUMN | birkhoff classify ... -"},
      {"not UTF-8", {"classify", "run", "latin.txt"}, 4, "latin.txt:1: byte 3 of the line is not"},
      {"long line", {"classify", "run", "long_line.txt"}, 4, "long_line.txt:1: the line is longer"},
      {"unknown class",
       {"prepare", "--out", "new_corpus", "--like", "run", "--text-column", "1", "--label-column",
        "2", "--valid", "0", "unknown.tsv"},
       4,
       "lukewarm"},
  };
  for (const Refusal& refusal : refusals) {
    SCOPED_TRACE(refusal.name);
    const Finished finished = run_child({.line = birkhoff_line(refusal.arguments)});
    EXPECT_EQ(finished.code, refusal.code) << finished.err;
    EXPECT_THAT(finished.err, HasSubstr(refusal.message));
    EXPECT_EQ(std::count(finished.err.begin(), finished.err.end(), '\n'), 1) << finished.err;
    // Of the lines before a bad one, the classes are printed.
    EXPECT_EQ(std::count(finished.out.begin(), finished.out.end(), '\n'),
              refusal.name == "empty line" ? 1 : 0);
  }
}

// A labeled corpus that is prepared like the model can be evaluated; its classes keep their order.
TEST_F(ClassifyProcess, EvaluatesAnotherTablePreparedLikeTheModel) {
  // Only texts of the second class, so that its value shows.
  std::string good = "id\tmood\treview\n";
  std::istringstream rows(some_reviews(kTestTexts, 3));
  std::int64_t num_good = 0;
  for (std::string row; std::getline(rows, row);) {
    if (row.find("\tgood\t") == std::string::npos) continue;
    good += row + "\n";
    ++num_good;
  }
  for (const char* name : {"good.tsv", "more_good.tsv"}) write_bytes(name, good);
  run_well({"prepare", "--out", "again", "--like", "run", "--text-column", "review",
            "--label-column", "mood", "--train", "good.tsv", "--test", "more_good.tsv"});
  EXPECT_THAT(run_well({"inspect", "again"}).out, HasSubstr("2 classes (bad, good)"));
  const auto figures = nlohmann::json::parse(
      run_well({"eval", "run", "--corpus", "again", "--split", "test", "--json"}).out);
  EXPECT_EQ(figures["sequences"], num_good);
  EXPECT_GT(figures["accuracy"], 0.9);
}

// The whole way on a table in the form of SST-2 (Socher et al. 2013). The majority class has 55 %
// of the validation split.
TEST_F(ClassifyProcess, SentimentsAreLearned) {
  std::map<std::string, std::int64_t> rows;
  for (const std::string split : {"train", "dev", "test"}) {
    write_sentiments(split, "sst2." + split + ".tsv");
    std::ifstream table("sst2." + split + ".tsv");
    rows[split] = std::count(std::istreambuf_iterator<char>(table), {}, '\n') - 1;
  }
  run_well({"prepare", "--out", "sst2", "--tokenizer", "words", "--vocab-size", "8000",
            "--text-column", "sentence", "--label-column", "label", "--train", "sst2.train.tsv",
            "--valid", "sst2.dev.tsv", "--test", "sst2.test.tsv"});
  const std::string corpus = run_well({"inspect", "sst2"}).out;
  for (const auto& [split, count] : rows) {
    EXPECT_THAT(corpus, HasSubstr(std::to_string(count) + " documents")) << split;
  }
  EXPECT_THAT(corpus, HasSubstr("label label: 2 classes (0, 1)"));
  run_well({"verify", "sst2"});
  run_well({"train", "sent.txtpb", "--run", "sst2_run", "--set", "data.corpus=sst2", "--set",
            "train.steps=300", "--set", "train.global_batch=32", "--set", "evaluate.every=0",
            "--set", "data.sequence_length=32"});
  const auto figures = nlohmann::json::parse(run_well({"eval", "sst2_run", "--json"}).out);
  EXPECT_EQ(figures["sequences"], rows["dev"]);
  EXPECT_GT(figures["accuracy"], 0.7);
}

// Training and evaluation say that they cut texts.
TEST_F(ClassifyProcess, CutTextsAreCounted) {
  for (const char* file : {"long.tsv", "valid.tsv"}) {
    write_bytes(file, "text\tlabel\na b\t0\na b c d\t1\na b c d e\t0\na\t1\na b c d e f\t0\n");
  }
  run_well({"prepare", "--out", "long", "--tokenizer", "words", "--text-column", "text",
            "--label-column", "label", "--train", "long.tsv", "--valid", "valid.tsv"});
  const std::string error =
      run_well({"train", "sent.txtpb", "--run", "long_run", "--set", "data.corpus=long", "--set",
                "train.steps=2", "--set", "data.sequence_length=4"})
          .err;
  EXPECT_THAT(error, HasSubstr("warning: 3 of 5 texts of split train are cut to their first "
                               "data.sequence_length = 4 tokens"));
  EXPECT_THAT(error, HasSubstr("train.global_batch = 12 sequences, but an epoch has 5: each step "
                               "repeats some"));
  EXPECT_THAT(
      error,
      HasSubstr("the warm-up (train.schedule.warmup_steps = 5) is not shorter than the run"));
  EXPECT_THAT(run_well({"eval", "long_run"}).err,
              HasSubstr("warning: 3 of 5 texts of split valid are cut to their first "
                        "data.sequence_length = 4 tokens"));
}

// A run of an earlier version may have values without effect: it resumes, with a warning.
TEST_F(ClassifyProcess, ARunWithAValueWithoutEffectResumes) {
  const std::vector<std::string> arguments = {"train", "sent.txtpb", "--run",
                                              "old",   "--set",      "train.steps=4"};
  run_well(arguments);
  std::vector<std::string> more = arguments;
  more.back() = "train.steps=6";
  more.insert(more.end(), {"--set", "train.max_skipped=7", "--set", "train.non_finite=stop"});
  EXPECT_THAT(run_well(more).err,
              HasSubstr("warning: train.max_skipped: 7 has no effect unless non_finite is skip"));
  EXPECT_THAT(run_well({"runs", "old"}).out, HasSubstr("old"));
  more[3] = "new";
  const Finished refused = run_child({.line = birkhoff_line(more)});
  EXPECT_EQ(refused.code, 3);
  EXPECT_THAT(refused.err, HasSubstr("train.max_skipped: 7 has no effect unless"));
}

}  // namespace
}  // namespace birkhoff
