// Words encoded one by one and remembered have the ids that the SentencePiece library gives the
// whole text, for models of every kind that users bring.
#include "data/tokenizers/byte_pairs.h"

#include <gtest/gtest.h>
#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <optional>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "data/tokenizers/line_iterator.h"
#include "data/tokenizers/sentencepiece_tokenizer.h"

namespace birkhoff {
namespace {

using Settings = std::unordered_map<std::string, std::string>;

// A text of words that come again, and of what may stand between words.
std::string random_text(std::mt19937& random, int num_words) {
  static const std::vector<std::string> kWords = {
      "the", "attends", "Sinkhorn",     "na\u00efve", "\u20ac5", "block", "sorting",
      "a",   "end.",    "\u4f60\u597d", "1234567",    "don't",   "x",     "aaaaaaaaaaaa"};
  static const std::vector<std::string> kBetween = {" ",    " ",  " ", " ",    "  ", "\n",
                                                    "\n\n", "\t", "",  " \n ", "   "};
  std::string text;
  for (int i = 0; i < num_words; ++i) {
    text += kBetween[random() % kBetween.size()];
    text += kWords[random() % kWords.size()];
  }
  for (unsigned spaces = random() % 3; spaces > 0; --spaces) text += ' ';
  return text;
}

struct Model {
  const char* name;
  Settings settings;
  bool cuts_words;
};

void PrintTo(const Model& model, std::ostream* out) { *out << model.name; }

const Settings kPlain = {{"normalization_rule_name", "identity"},
                         {"remove_extra_whitespaces", "false"}};

Settings with(Settings settings, const Settings& more) {
  for (const auto& [name, value] : more) settings[name] = value;
  return settings;
}

class BytePairsOf : public testing::TestWithParam<Model> {
 protected:
  BytePairsOf() {
    std::mt19937 random(1);
    std::vector<std::string> lines;
    for (int i = 0; i < 300; ++i) lines.push_back(random_text(random, 20));
    const Settings all = with({{"model_type", "bpe"},
                               {"vocab_size", "340"},
                               {"character_coverage", "1.0"},
                               {"hard_vocab_limit", "false"},
                               {"num_threads", "1"},
                               {"minloglevel", "3"}},
                              GetParam().settings);
    LineIterator sentences(lines);
    const auto status = sentencepiece::SentencePieceTrainer::Train(all, &sentences, &model_);
    EXPECT_TRUE(status.ok()) << status.ToString();
    EXPECT_TRUE(library_.LoadFromSerializedProto(model_).ok());
  }

  // Ids, and the text of unknown tokens.
  std::pair<std::vector<std::int32_t>, std::string> by_library(const std::string& text) const {
    std::pair<std::vector<std::int32_t>, std::string> result;
    const auto encoded = library_.EncodeAsImmutableProto(text);
    for (const auto& piece : encoded.pieces()) {
      result.first.push_back(static_cast<std::int32_t>(piece.id()));
      if (result.first.back() == library_.unk_id()) result.second += piece.surface() + '\xff';
    }
    return result;
  }

  std::string model_;
  sentencepiece::SentencePieceProcessor library_;
};

INSTANTIATE_TEST_SUITE_P(
    Models, BytePairsOf,
    testing::Values(
        Model{"Ours", with(kPlain, {{"add_dummy_prefix", "false"}, {"byte_fallback", "true"}}),
              true},
        Model{"WithPrefix", with(kPlain, {{"byte_fallback", "true"}}), true},
        Model{"WithUnknown", with(kPlain, {{"add_dummy_prefix", "false"}}), true},
        Model{"WithPrefixAndUnknown", kPlain, true},
        Model{"WithSymbols",
              with(kPlain, {{"user_defined_symbols", "Sink,\u4f60"}, {"byte_fallback", "true"}}),
              true},
        Model{"AcrossWords", with(kPlain, {{"split_by_whitespace", "false"}}), false},
        Model{"RemovesSpaces", {{"normalization_rule_name", "identity"}}, false},
        Model{"Normalizes", {{"byte_fallback", "true"}}, false},
        Model{"SpaceAsSuffix", with(kPlain, {{"treat_whitespace_as_suffix", "true"}}), false},
        Model{"Unigram", with(kPlain, {{"model_type", "unigram"}}), false}),
    [](const auto& model) { return std::string(model.param.name); });

TEST_P(BytePairsOf, IdsAreTheLibrarys) {
  const std::optional<BytePairs> byte_pairs = BytePairs::of(model_);
  EXPECT_EQ(byte_pairs.has_value(), GetParam().cuts_words);
  const auto tokenizer = make_sentencepiece_tokenizer(model_, "model", library_.GetPieceSize());
  std::mt19937 random(2);
  std::vector<std::string> texts = {"",
                                    " ",
                                    "  ",
                                    "a",
                                    " a",
                                    "a ",
                                    "\n",
                                    "a\n",
                                    " \n ",
                                    "\n\n  a",
                                    "a\u2581b",
                                    "a \u2581 b",
                                    "\u2581",
                                    "a\xff b",
                                    "\xe2\x82 a",
                                    "</s> <s> <unk> <0x0A>",
                                    std::string(300, 'a') + " b"};
  for (int trial = 0; trial < 400; ++trial) {
    std::string text = random_text(random, static_cast<int>(random() % 30));
    // Characters that no line had, and bytes that are not UTF-8.
    if (trial % 4 == 1) text.insert(random() % (text.size() + 1), "\u0416");
    if (trial % 4 == 2) text.insert(random() % (text.size() + 1), "q~Q");
    if (trial % 8 == 3) text.insert(random() % (text.size() + 1), "\xc3");
    texts.push_back(std::move(text));
  }
  for (int pass = 0; pass < 2; ++pass) {  // the second one of words that are known
    for (const std::string& text : texts) {
      std::string unknown;
      const auto ids = tokenizer->encode(text, &unknown);
      ASSERT_EQ(std::pair(ids, unknown), by_library(text)) << testing::PrintToString(text);
      ASSERT_EQ(tokenizer->encode(text), ids) << testing::PrintToString(text);
    }
  }
}

TEST_P(BytePairsOf, WordsAreShort) {
  if (!GetParam().cuts_words) return;
  const std::optional<BytePairs> byte_pairs = BytePairs::of(model_);
  ASSERT_TRUE(byte_pairs);
  std::mt19937 random(3);
  int num_words = 0, num_encoded = 0;
  for (int trial = 0; trial < 100; ++trial) {
    const std::string text = random_text(random, 50);
    for (std::string_view rest = text; !rest.empty();) {
      const std::string_view word = rest.substr(0, byte_pairs->word_length(rest));
      rest.remove_prefix(word.size());
      const std::size_t begin = word.find_first_not_of(' ');
      // Between the spaces before a word and those that end the text, there are none.
      ASSERT_TRUE(rest.empty() || word.find(' ', begin) == std::string_view::npos) << word;
      std::vector<std::int32_t> ids;
      num_encoded += word.size() <= BytePairs::kMaxWordBytes && byte_pairs->encode(word, ids);
      ++num_words;
    }
  }
  EXPECT_GT(num_words, 100 * 30);
  // With pieces that users have defined, the library encodes each word.
  const bool has_symbols = GetParam().settings.contains("user_defined_symbols");
  EXPECT_GE(num_encoded, has_symbols ? 0 : num_words / 2);
  EXPECT_LE(num_encoded, has_symbols ? 0 : num_words);
}

}  // namespace
}  // namespace birkhoff
