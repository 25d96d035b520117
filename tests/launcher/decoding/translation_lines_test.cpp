// `generate` with a model of pairs: a split of its corpus and lines of a file, scores, ranks.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "data/generate/generated_pairs.h"
#include "tests/launcher/bad_input/damage.h"
#include "tests/launcher/program_fixture.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

constexpr char kConfig[] = R"(task { translation {} }
data { corpus: "sort" sequence_length: 10 }
model {
  layers: 1
  channels: 32
  heads: 2
  dropout { embedding: 0 residual: 0 }
}
train {
  steps: 150
  global_batch: 64
  schedule { learning_rate: 1e-2 warmup_steps: 20 }
}
checkpoint { every: 75 }
evaluate { every: 0 }
)";

std::vector<std::string> rows_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

// `run` sorts up to four of five symbols, `sort` has 60 test cases of up to six.
class TranslationLines : public ProgramTest {
 protected:
  static void SetUpTestSuite() {
    make_folder("birkhoff_translation_lines");
    write_bytes("config.txtpb", kConfig);
    out_of({"prepare", "--out", "sort", "--generate", "sort", "--symbols", "5", "--train-length",
            "4", "--length", "6", "--samples", "3000", "--test-samples", "60"});
    out_of({"train", "config.txtpb", "--run", "run"});
    write_bytes("sources.txt", "3 1 2\n0\n4 4 1 0\n2 1\n");
  }
  static void TearDownTestSuite() { remove_folder(); }

  // The texts of the targets of `sort`, split test.
  static std::vector<std::string> references_of_test() {
    const GeneratedPairs sort{
        .task = "sort", .symbols = 5, .train_length = 4, .length = 6, .samples = 3000};
    std::vector<std::string> texts;
    for (std::int64_t i = 0; i < 60; ++i) {
      std::string& text = texts.emplace_back();
      for (const std::int32_t id : sort.target(sort.source(/*split=*/2, i))) {
        if (id == GeneratedPairs::kEndId) continue;
        text += (text.empty() ? "" : " ") + std::to_string(id - GeneratedPairs::kFirstSymbolId);
      }
    }
    return texts;
  }
};

TEST_F(TranslationLines, ExactMatchOfASplitIsThatOfItsTexts) {
  const std::vector<std::string> command = {"generate", "run",   "--split", "test",
                                            "--out",    "texts", "--score", "exact_match"};
  const std::string table = out_of(command);
  const std::vector<std::string> texts = rows_of(read_bytes("texts"));
  ASSERT_EQ(texts.size(), 60u);
  const std::vector<std::string> references = references_of_test();
  std::int64_t right = 0;
  for (std::size_t i = 0; i < texts.size(); ++i) right += texts[i] == references[i];
  EXPECT_GT(right, 0);  // else the next line says little
  const std::vector<std::string> rows = rows_of(table);
  EXPECT_THAT(rows.front(), HasSubstr("exact match"));
  EXPECT_THAT(rows.back(), testing::ContainsRegex(fmt::format(
                               "all +60 +{:.2f} ", 100 * static_cast<double>(right) / 60)));

  std::vector<std::string> on_ranks = command;
  on_ranks.insert(on_ranks.end(), {"--ranks", "2"});
  EXPECT_EQ(out_of(on_ranks), table);
  EXPECT_EQ(rows_of(read_bytes("texts")), texts);
}

// The first wrong id is the same, whatever follows it.
TEST_F(TranslationLines, ExactMatchWithTrueTokensIsThatOfGreedySearch) {
  const std::vector<std::string> command = {"generate", "run",     "--split",
                                            "test",     "--score", "exact_match"};
  const auto all_of = [&](std::vector<std::string> more) {
    more.insert(more.begin(), command.begin(), command.end());
    std::istringstream row(rows_of(out_of(more)).back());
    std::string name, cases, match, edits;
    row >> name >> cases >> match >> edits;
    EXPECT_EQ(name, "all");
    return std::pair(match, std::stod(edits));
  };
  const auto greedy = all_of({"--beam", "1"}), forced = all_of({"--teacher-forced"});
  EXPECT_EQ(forced.first, greedy.first);
  EXPECT_GT(forced.second, 0);
  EXPECT_NE(forced.second, greedy.second);
  EXPECT_EQ(all_of({"--teacher-forced", "--ranks", "2", "--batch", "3"}), forced);
}

// A model that has learned to sort short sequences: more than chance by far.
TEST_F(TranslationLines, LinesOfAFileAreTranslated) {
  const std::vector<std::string> texts =
      rows_of(out_of({"generate", "run", "--input", "sources.txt", "--beam", "2"}));
  ASSERT_EQ(texts.size(), 4u);
  EXPECT_EQ(texts[1], "0");
  EXPECT_EQ(texts[3], "1 2");
  EXPECT_EQ(out_of({"generate", "run", "--input", "sources.txt", "--beam", "2", "--batch", "1"}),
            out_of({"generate", "run", "--input", "sources.txt", "--beam", "2", "--ranks", "2"}));
  for (const std::string& line :
       rows_of(out_of({"generate", "run", "--input", "sources.txt", "--json"}))) {
    const nlohmann::json object = nlohmann::json::parse(line);
    EXPECT_LE(object["tokens"], 10);
    EXPECT_LT(object["log_probability"], 0);
  }
}

TEST_F(TranslationLines, BleuOfASplitCountsItsTexts) {
  const std::string of_split = out_of({"generate", "run", "--split", "test", "--out", "texts",
                                       "--score", "bleu", "--tokenize", "none"});
  std::string references;
  for (const std::string& line : references_of_test()) references += line + '\n';
  write_bytes("references", references);
  EXPECT_EQ(of_split, out_of({"bleu", "texts", "references", "--tokenize", "none"}));
  EXPECT_THAT(of_split, HasSubstr("BLEU|nrefs:1|case:mixed|eff:no|tok:none|smooth:exp"));
}

// Teacher forcing gives the probabilities with which greedy search has found its texts.
TEST_F(TranslationLines, ScoresOfFoundTextsAreThoseOfTheSearch) {
  std::vector<nlohmann::json> found;
  for (const std::string& line :
       rows_of(out_of({"generate", "run", "--input", "sources.txt", "--json"})))
    found.push_back(nlohmann::json::parse(line));
  const std::vector<std::string> sources = rows_of(read_bytes("sources.txt"));
  ASSERT_EQ(found.size(), sources.size());
  std::string pairs;
  for (std::size_t i = 0; i < sources.size(); ++i)
    pairs += nlohmann::json{{"source", sources[i]}, {"target", found[i]["text"]}}.dump() + '\n';
  pairs += R"({"source": "0", "target": "0 0"})" + std::string("\n");
  pairs +=
      R"({"source": "0 1 2 3 0 1 2 3 0 1", "target": "0 0 0 1 1 1 2 2 3 3 4"})" + std::string("\n");
  write_bytes("pairs.jsonl", pairs);
  const std::string printed = out_of({"score", "run", "--input", "pairs.jsonl"});
  const std::vector<std::string> scores = rows_of(printed);
  ASSERT_EQ(scores.size(), sources.size() + 2);
  for (std::size_t i = 0; i < sources.size(); ++i) {
    const nlohmann::json score = nlohmann::json::parse(scores[i]);
    // fp32, in matrix products of other sizes
    EXPECT_NEAR(score["log_likelihood"], found[i]["log_probability"].get<double>(), 1e-4);
    EXPECT_EQ(score["tokens"], found[i]["tokens"]);
    EXPECT_TRUE(score["is_greedy"]);
    EXPECT_FALSE(score.contains("cut_tokens"));
  }
  const nlohmann::json wrong = nlohmann::json::parse(scores[sources.size()]);
  EXPECT_FALSE(wrong["is_greedy"]);
  EXPECT_EQ(wrong["tokens"], 3);
  EXPECT_LT(wrong["log_likelihood"], nlohmann::json::parse(scores[1])["log_likelihood"]);
  // 11 tokens of the source and 12 of the target, with end marks, of 10 that the model reads.
  const nlohmann::json cut = nlohmann::json::parse(scores.back());
  EXPECT_EQ(cut["cut_tokens"], 3);
  EXPECT_EQ(cut["tokens"], 10);
  EXPECT_EQ(out_of({"score", "run", "--input", "pairs.jsonl", "--ranks", "2"}), printed);
}

TEST_F(TranslationLines, WhatTheModelCannotDoIsRefused) {
  expect_refused({"generate", "run", "--input", "sources.txt", "--max-tokens", "11"},
                 ExitCode::kUsage, "--max-tokens 11");
  expect_refused({"generate", "run", "--split", "valid", "--corpus", "nowhere"}, ExitCode::kData,
                 "nowhere");
  expect_refused({"generate", "run", "--score", "bleu"}, ExitCode::kUsage, "--split");
  expect_refused({"generate", "run", "--split", "test", "--score", "bleu", "--teacher-forced"},
                 ExitCode::kUsage, "--teacher-forced: needs --score exact_match");
  expect_refused({"eval", "run", "--documents", "losses.jsonl"}, ExitCode::kUsage,
                 "--documents losses.jsonl: only a language model");
  expect_refused({"sample", "run", "--prompt", "1"}, ExitCode::kUsage, "run");
  expect_refused({"score", "run", "--input", "sources.txt"}, ExitCode::kData,
                 "sources.txt:1: is not a JSON object; a line is {\"source\": \"...\"");
  write_bytes("texts.jsonl", "{\"text\": \"1\"}\n");
  expect_refused({"score", "run", "--input", "texts.jsonl"}, ExitCode::kData,
                 "texts.jsonl:1: needs \"source\"");
  write_bytes("texts.jsonl", "{\"source\": \"1\", \"target\": 1}\n");
  expect_refused({"score", "run", "--input", "texts.jsonl"}, ExitCode::kData,
                 "texts.jsonl:1: \"target\" is not a text");
}

}  // namespace
}  // namespace birkhoff
