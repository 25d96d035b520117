// `generate`, `score`, `bleu`, `average` and `export` as users run them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/launcher/bad_input/damage.h"
#include "tests/launcher/bad_input/good_input.h"
#include "tests/launcher/program_fixture.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::HasSubstr;

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

std::vector<json> objects_of(const std::string& text) {
  std::vector<json> objects;
  for (const std::string& line : lines_of(text)) objects.push_back(json::parse(line));
  return objects;
}

// The beginning of text/one.txt on one line, which does not end in a space.
std::string one_line(std::size_t length) {
  std::string text = read_bytes("text/one.txt").substr(0, length);
  std::replace(text.begin(), text.end(), '\n', ' ');
  while (text.back() == ' ') text.back() = 'a';
  return text;
}

// `lines_run` has the checkpoints of steps 2 and 4, of a model of characters; each line of
// text/one.txt is a document, with an end mark.
class Decoding : public ProgramTest {
 protected:
  static void SetUpTestSuite() {
    make_folder("birkhoff_decoding");
    make_good_input(fs::current_path());
    out_of({"prepare", "--out", "lines", "--lines", "--tokenizer", "chars", "text/one.txt"});
    out_of({"train", "good.txtpb", "--run", "lines_run", "--set", "data.corpus=lines"});
    // Words of text/one.txt, of different lengths, and an empty line.
    std::istringstream words(read_bytes("text/one.txt"));
    std::string prompts, word, so_far;
    for (int i = 0; i < 25 && words >> word; ++i) {
      so_far = i % 5 == 0 ? word : so_far + " " + word;
      prompts += (i == 7 ? "" : so_far.substr(0, 20)) + "\n";
    }
    write_bytes("prompts.txt", prompts);
  }
  static void TearDownTestSuite() { remove_folder(); }

  static std::string generated(const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"generate",    "lines_run",    "--input",
                                          "prompts.txt", "--max-tokens", "10"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return out_of(arguments);
  }
  static std::vector<json> scored(const std::vector<json>& lines,
                                  const std::vector<std::string>& more = {}) {
    std::string input;
    for (const json& line : lines) input += line.dump() + "\n";
    write_bytes("texts.jsonl", input);
    std::vector<std::string> arguments = {"score", "lines_run", "--input", "texts.jsonl"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return objects_of(out_of(arguments));
  }
};

TEST_F(Decoding, TextsDoNotDependOnBatchesRanksOrTheWayLinesCome) {
  for (const std::vector<std::string>& how :
       {std::vector<std::string>{"--beam", "3"}, std::vector<std::string>{"--temperature", "1"}}) {
    const std::string texts = generated(how);
    ASSERT_EQ(lines_of(texts).size(), 25u);
    auto with = [&](std::vector<std::string> more) {
      more.insert(more.end(), how.begin(), how.end());
      return more;
    };
    EXPECT_EQ(generated(with({"--batch", "3"})), texts);
    EXPECT_EQ(generated(with({"--ranks", "2"})), texts);
    EXPECT_EQ(generated(with({"--out", "texts.txt"})), "");
    EXPECT_EQ(read_bytes("texts.txt"), texts);
    Command piped{.line = birkhoff_line(with({"generate", "lines_run", "--max-tokens", "10"}))};
    piped.input = "prompts.txt";
    EXPECT_EQ(run_child(piped).out, texts);
  }
}

// A beam of one, and sampling at temperature 0: what `sample` generates, up to the end mark.
TEST_F(Decoding, GreedyTextsAreThoseOfSample) {
  const std::string greedy = generated({"--beam", "1"});
  EXPECT_EQ(generated({"--temperature", "0"}), greedy);
  const std::vector<std::string> prompts = lines_of(read_bytes("prompts.txt")),
                                 texts = lines_of(greedy);
  ASSERT_EQ(texts.size(), prompts.size());
  for (const std::size_t i : {0u, 3u, 7u, 11u}) {
    const std::string sample = out_of(
        {"sample", "lines_run", "--prompt", prompts[i], "--tokens", "10", "--temperature", "0"});
    std::string escaped;
    for (const char c : sample.substr(prompts[i].size()))
      escaped += c == '\n' ? "\\n" : std::string(1, c);
    EXPECT_EQ(escaped.substr(0, texts[i].size()), texts[i]) << i;
  }
}

// The cached decoder and one pass over the whole text, in fp32, differ by rounding.
TEST_F(Decoding, LogProbabilitiesAreThoseThatScorePrints) {
  const std::vector<json> found =
      objects_of(generated({"--beam", "4", "--length-penalty", "0.6", "--json"}));
  const std::vector<std::string> prompts = lines_of(read_bytes("prompts.txt"));
  std::vector<json> lines;
  std::vector<double> expected;
  for (std::size_t i = 0; i < found.size(); ++i) {
    const double tokens = found[i]["tokens"], log_p = found[i]["log_probability"];
    EXPECT_NEAR(found[i]["score"], log_p / std::pow((5 + tokens) / 6, 0.6), 1e-9);
    if (found[i]["ended"]) continue;  // score counts no end mark
    lines.push_back({{"context", prompts[i]}, {"continuation", found[i]["text"]}});
    expected.push_back(log_p);
  }
  ASSERT_GT(lines.size(), 5u);
  const std::vector<json> scores = scored(lines);
  for (std::size_t i = 0; i < lines.size(); ++i) {
    if (lines[i]["context"].get<std::string>().ends_with(' ')) continue;
    EXPECT_EQ(scores[i]["tokens"], 10);
    EXPECT_NEAR(scores[i]["log_likelihood"], expected[i], 1e-4) << lines[i];
  }
}

TEST_F(Decoding, LikelihoodsOfPartsAddUpAndGreedyTextsAreGreedy) {
  const std::string text = one_line(30);
  const std::string first = one_line(12), second = text.substr(12, 10), third = text.substr(22);
  const std::string greedy = objects_of(generated({"--beam", "1", "--json"}))[0]["text"];
  const std::string prompt = lines_of(read_bytes("prompts.txt"))[0];
  const std::vector<json> lines = {
      {{"context", first}, {"continuation", second + third}},
      {{"context", first}, {"continuation", second}},
      {{"context", first + second}, {"continuation", third}},
      {{"text", text}},
      {{"continuation", text}},
      {{"context", prompt}, {"continuation", greedy}},
      {{"context", first + " "}, {"continuation", "a"}},
      {{"context", first}, {"continuation", " a"}},
  };
  const std::vector<json> scores = scored(lines);
  const auto log_p = [&](std::size_t i) { return scores[i]["log_likelihood"].get<double>(); };
  ASSERT_NE(second.back(), ' ');  // it would belong to the third
  // fp32 logits of passes over other lengths.
  EXPECT_NEAR(log_p(0), log_p(1) + log_p(2), 1e-4);
  EXPECT_EQ(scores[0]["tokens"], 18);
  EXPECT_EQ(scores[3]["tokens"], 30);
  EXPECT_EQ(scores[4], scores[3]);
  EXPECT_EQ(scores[5]["is_greedy"], true);
  EXPECT_EQ(scores[3]["is_greedy"], false);
  EXPECT_EQ(scores[6], scores[7]) << "a space at the end of the context belongs to the text";
  EXPECT_EQ(scored(lines, {"--ranks", "2"}), scores);
}

TEST_F(Decoding, OfLongTextsTheEndIsScoredAndThePartIsNamed) {
  const std::string text = one_line(100);
  write_bytes("long.jsonl", json({{"text", text}}).dump() + "\n" +
                                json({{"context", text}, {"continuation", "ab"}}).dump() + "\n");
  const Finished finished = birkhoff({"score", "lines_run", "--input", "long.jsonl"});
  ASSERT_EQ(finished.code, 0) << finished.err;
  EXPECT_THAT(finished.err, HasSubstr("2 texts only the end is read"));
  const std::vector<json> scores = objects_of(finished.out);
  EXPECT_EQ(scores[0]["tokens"], 32);  // data.sequence_length
  EXPECT_EQ(scores[0]["cut_tokens"], 101 - 33);
  EXPECT_EQ(scores[1]["tokens"], 2);
  // The same as if the rest had been given.
  const std::vector<json> end =
      scored({{{"context", text.substr(100 - 31)}, {"continuation", "ab"}}});
  EXPECT_NEAR(end[0]["log_likelihood"], scores[1]["log_likelihood"].get<double>(), 1e-4);
}

TEST_F(Decoding, PromptsAreCutWithAWarning) {
  write_bytes("long.txt", one_line(60) + "\nshort\n");
  const Finished finished =
      birkhoff({"generate", "lines_run", "--input", "long.txt", "--max-tokens", "20"});
  ASSERT_EQ(finished.code, 0) << finished.err;
  EXPECT_EQ(lines_of(finished.out).size(), 2u);
  EXPECT_THAT(finished.err, HasSubstr("of 1 prompt only the end is read"));
}

TEST_F(Decoding, MeanOfCheckpointsIsReadLikeARun) {
  EXPECT_THAT(out_of({"average", "lines_run", "--last", "2", "--out", "mean"}),
              HasSubstr("mean/checkpoints/step-00000004: the mean of 2 checkpoints, steps 2 to 4"));
  const json of_mean = json::parse(out_of({"eval", "mean", "--json"})),
             of_run = json::parse(out_of({"eval", "lines_run", "--json"}));
  EXPECT_NE(of_mean["loss"], of_run["loss"]);
  EXPECT_EQ(of_mean["tokens"], of_run["tokens"]);
  EXPECT_EQ(lines_of(out_of({"generate", "mean", "--input", "prompts.txt"})).size(), 25u);
  out_of({"sample", "mean", "--prompt", "a", "--tokens", "3"});
  EXPECT_THAT(out_of({"verify", "mean"}), HasSubstr("verified"));
  // It has no optimizer state.
  expect_refused({"train", "good.txtpb", "--run", "mean"}, ExitCode::kUsage, "mean");
  expect_refused({"average", "lines_run", "--last", "2", "--out", "mean"}, ExitCode::kUsage,
                 "not an empty folder");
}

TEST_F(Decoding, ExportedWeightsAreReadLikeARun) {
  EXPECT_THAT(out_of({"export", "lines_run", "--out", "weights"}),
              HasSubstr("weights/checkpoints/step-00000004: the weights of step 4"));
  EXPECT_EQ(json::parse(out_of({"eval", "weights", "--json"}))["loss"],
            json::parse(out_of({"eval", "lines_run", "--json"}))["loss"]);
  EXPECT_THAT(out_of({"verify", "weights"}), HasSubstr("verified"));
  for (const auto& file : fs::directory_iterator("weights/checkpoints/step-00000004"))
    EXPECT_THAT(file.path().filename().string(), testing::Not(HasSubstr("optimizer")));
  expect_refused({"train", "good.txtpb", "--run", "weights"}, ExitCode::kUsage, "weights");
  // Of an earlier checkpoint, and of exported weights: the same ones.
  EXPECT_THAT(out_of({"export", "lines_run/checkpoints/step-00000002", "--out", "earlier"}),
              HasSubstr("the weights of step 2"));
  out_of({"export", "weights", "--out", "again"});
  const std::string file = "/checkpoints/step-00000004/model-00001-of-00001.safetensors";
  EXPECT_TRUE(read_bytes("again" + file) == read_bytes("weights" + file));
}

TEST_F(Decoding, BleuIsPrintedAndAllReferencesCount) {
  write_bytes("hypotheses", "the cat sat on the mat .\r\nA dog runs.\n");
  write_bytes("references", "the cat is on the mat .\nA dog runs fast.\n");
  EXPECT_EQ(out_of({"bleu", "hypotheses", "hypotheses"}),
            "BLEU|nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:birkhoff = 100.00 "
            "100.0/100.0/100.0/100.0 (BP = 1.000 ratio = 1.000 hyp_len = 11 ref_len = 11)\n");
  const json one = json::parse(out_of({"bleu", "hypotheses", "references", "--json"})),
             both = json::parse(out_of({"bleu", "hypotheses", "references", "hypotheses",
                                        "--tokenize", "intl", "--json"}));
  EXPECT_LT(one["bleu"], 60);
  EXPECT_GT(one["bleu"], 20);
  EXPECT_NEAR(both["bleu"], 100, 1e-9);
  EXPECT_THAT(both["signature"].get<std::string>(), HasSubstr("nrefs:2"));
}

}  // namespace
}  // namespace birkhoff
