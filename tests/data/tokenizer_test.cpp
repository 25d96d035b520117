#include <gtest/gtest.h>

#include <cstdlib>
#include <random>

#include "cluster/base/text/utf8.h"
#include "data/corpus/corpus.h"
#include "data/corpus/manifest.h"
#include "data/tokenizers/char_vocabulary.h"
#include "data/tokenizers/sentencepiece_tokenizer.h"
#include "data/tokenizers/tokenizer_file.h"
#include "data/tokenizers/word_vocabulary.h"
#include "tests/data/helpers.h"

namespace birkhoff {
namespace {

using Ids = std::vector<std::int32_t>;
const std::string kText =
    "The quick  brown fox,\n\tjumps over\u00e9 the \u20ac lazy \U0001f600 dog's back.\r\n\nEnd_1 "
    "\\n ";

TEST(Utf8, KnowsValidFromInvalid) {
  const std::vector<std::pair<std::string, std::size_t>> cases = {
      {"", std::string::npos},
      {"plain", std::string::npos},
      {"\u00e9\u20ac\U0001f600", std::string::npos},
      {"a\x80", 1},
      {"\xc3", 0},
      {"ab\xc0\xaf", 2},
      {"\xed\xa0\x80", 0},
      {"\xf4\x90\x80\x80", 0},
      {"\xf5\x80\x80\x80", 0},
      {"\xe0\x80\xaf", 0},
      {"x\xe2\x82", 1},
      {"\xf0\x9f\x98\x80", std::string::npos},
      {"\xef\xbf\xbf", std::string::npos},
      {"\xf0\x80\x80\x80", 0},
      {"\xff", 0}};
  for (const auto& [text, position] : cases)
    EXPECT_EQ(find_invalid_utf8(text), position) << testing::PrintToString(text);
}

TEST(Utf8, EveryCodePointRoundTrips) {
  for (std::uint32_t c = 0; c <= 0x10ffff; c += (c < 0x3000 ? 1 : 37)) {
    if (c >= 0xd800 && c <= 0xdfff) continue;
    std::string text;
    append_utf8(c, text);
    const Utf8Character character = utf8_at(text, 0);
    ASSERT_EQ(character.code_point, c);
    ASSERT_EQ(static_cast<std::size_t>(character.bytes), text.size());
    for (std::size_t cut = 1; cut < text.size(); ++cut)
      ASSERT_EQ(complete_utf8("a" + text.substr(0, cut)), 1u);
    ASSERT_EQ(complete_utf8(text), text.size());
  }
}

TEST(ByteTokenizer, RoundTripsEveryByte) {
  const auto tokenizer = load_tokenizer("bytes", "", 257);
  std::string all;
  for (int i = 0; i < 256; ++i) all += static_cast<char>(i);
  const Ids ids = tokenizer->encode(all);
  for (int i = 0; i < 256; ++i) EXPECT_EQ(ids[static_cast<std::size_t>(i)], i);
  EXPECT_EQ(tokenizer->decode(ids), all);
  EXPECT_EQ(tokenizer->decode({104, 256, 105}), "hi");  // the mark has no text
  expect_error(ExitCode::kData, [&] { tokenizer->decode({257}); }, {"257"});
  expect_error(ExitCode::kData, [&] { tokenizer->decode({-1}); }, {"-1"});
  expect_error(ExitCode::kData, [] { load_tokenizer("bytes", "", 258); }, {"258"});
}

TEST(CharTokenizer, IdsAreTheTrainingCharactersInOrder) {
  CharVocabulary vocabulary;
  vocabulary.add("b\u00e9a\nb", true);
  vocabulary.add("ab", false);
  EXPECT_EQ(vocabulary.file_content(), "birkhoff chars 1\nunknown no\na\n61\n62\ne9\n");
  const auto tokenizer = make_char_tokenizer(vocabulary.file_content(), "file", 4);
  EXPECT_EQ(tokenizer->encode("a\u00e9b\n"), (Ids{1, 3, 2, 0}));
  EXPECT_EQ(tokenizer->decode({1, 3, 2, 0}), "a\u00e9b\n");
  expect_error(ExitCode::kData, [&] { tokenizer->encode("abz"); }, {"'z'", "U+007A", "byte 2"});
  expect_error(ExitCode::kData, [&] { tokenizer->encode("ab\xff"); }, {"byte 2"});
}

TEST(CharTokenizer, UnknownIdOnlyIfOtherSplitsNeedIt) {
  CharVocabulary vocabulary;
  vocabulary.add("ab", true);
  vocabulary.add("abz", false);
  const auto tokenizer =
      make_char_tokenizer(vocabulary.file_content(), "file", 4);  // and an end mark
  EXPECT_EQ(tokenizer->encode("bzq"), (Ids{1, 2, 2}));
  EXPECT_EQ(tokenizer->decode({1, 2, 3}), "b\ufffd");
}

TEST(CharTokenizer, DamagedFilesAreRefused) {
  const std::vector<std::string> damaged = {"",
                                            "birkhoff chars 2\nunknown no\n61\n",
                                            "birkhoff chars 1\n",
                                            "birkhoff chars 1\nunknown maybe\n61\n",
                                            "birkhoff chars 1\nunknown no\n61",
                                            "birkhoff chars 1\nunknown no\n62\n61\n",
                                            "birkhoff chars 1\nunknown no\n61\n61\n",
                                            "birkhoff chars 1\nunknown no\n110000\n",
                                            "birkhoff chars 1\nunknown no\n\n",
                                            "birkhoff chars 1\nunknown no\n6x\n",
                                            "birkhoff chars 1\nunknown no\n61\n62\n63\n",
                                            "birkhoff chars 1\nunknown no\nfffffffff\n"};
  for (const std::string& content : damaged) {
    expect_error(ExitCode::kData, [&] { make_char_tokenizer(content, "the-file", 1); },
                 {"the-file"});
  }
}

std::vector<std::string> words_of(std::string_view text) {
  std::vector<std::string> words;
  for (std::size_t i = 0; i < text.size(); i += words.back().size())
    words.emplace_back(text.substr(i, word_length(text.substr(i))));
  return words;
}

TEST(WordTokenizer, CutsAsDocumented) {
  EXPECT_EQ(words_of("a bc,  d\n e"),
            (std::vector<std::string>{"a", " bc", ",", " ", " d", "\n", " e"}));
  EXPECT_EQ(words_of("x_1+\u00e9t\u00e9 "),
            (std::vector<std::string>{"x_1", "+", "\u00e9t\u00e9", " "}));
  EXPECT_EQ(words_of(" \n"), (std::vector<std::string>{" ", "\n"}));
  const auto cut = words_of(std::string(127, 'a') + "\u00e9\u00e9");
  EXPECT_EQ(cut, (std::vector<std::string>{std::string(127, 'a'),
                                           "\u00e9\u00e9"}));  // not within a character
}

TEST(WordTokenizer, WordsPutTogetherAreTheText) {
  std::mt19937 random(1);
  const std::string alphabet = "ab _.\n\t\\\xc3\xa9\xff";
  for (int trial = 0; trial < 200; ++trial) {
    std::string text;
    for (int i = 0; i < 300; ++i) text += alphabet[random() % alphabet.size()];
    std::string together;
    for (const std::string& word : words_of(text)) together += word;
    ASSERT_EQ(together, text);
  }
}

TEST(WordTokenizer, RanksByFrequencyThenBytes) {
  WordVocabulary vocabulary(WordRule::kAll);
  vocabulary.add("b a a c\\\n", true);
  vocabulary.add("d", false);
  EXPECT_EQ(vocabulary.file_content(100), "birkhoff words 1\n a\n\\n\n c\n\\\\\nb\n");
  EXPECT_EQ(vocabulary.file_content(2), "birkhoff words 1\n a\n");
  const auto tokenizer = make_word_tokenizer(vocabulary.file_content(100), "file", 6);
  const std::string text = "b a a c\\\n";
  EXPECT_EQ(tokenizer->decode(tokenizer->encode(text)), text);
  EXPECT_EQ(tokenizer->encode("b zz a"), (Ids{5, 0, 1}));
  EXPECT_EQ(tokenizer->decode({5, 0, 1}), "b <unk> a");
}

TEST(WordTokenizer, CountingIsBoundedAndKeepsFrequentWords) {
  WordVocabulary vocabulary(WordRule::kAll, /*max_distinct=*/50);
  std::string text;
  for (int i = 0; i < 2000; ++i) text += fmt::format("w{} often\n", i);
  vocabulary.add(text, true);
  EXPECT_EQ(vocabulary.file_content(3), "birkhoff words 1\n\\n\n often\n");
  const std::string all = vocabulary.file_content(1 << 20);
  EXPECT_LE(std::count(all.begin(), all.end(), '\n'), 51);
}

std::vector<std::string> whitespace_words_of(std::string_view text) {
  std::vector<std::string> words;
  for (std::string_view word; !(word = take_word(text, WordRule::kWhiteSpace)).empty();)
    words.emplace_back(word);
  return words;
}

// Words as WikiText splits them: its own <unk> and joined hyphens stay whole, and each line ends
// once.
TEST(WhiteSpaceTokenizer, CutsAtWhiteSpaceAndLineEnds) {
  EXPECT_EQ(whitespace_words_of(" \n = A <unk> = \n the 1 @-@ 2\t km , \n"),
            (std::vector<std::string>{"\n", "=", "A", "<unk>", "=", "\n", "the", "1", "@-@", "2",
                                      "km", ",", "\n"}));
  EXPECT_EQ(whitespace_words_of(" \t ").size(), 0u);
  EXPECT_EQ(whitespace_words_of("a  \u00e9\n\n"),
            (std::vector<std::string>{"a", "\u00e9", "\n", "\n"}));
}

TEST(WhiteSpaceTokenizer, HasAnUnknownIdOnlyIfItIsNeeded) {
  WordVocabulary vocabulary(WordRule::kWhiteSpace);
  vocabulary.add("a <unk> a\na b \n", true);
  vocabulary.add("b <unk>\n", false);
  const std::string all = "birkhoff whitespace 1\nunknown no\na\n\\n\n<unk>\nb\n";
  EXPECT_EQ(vocabulary.file_content(100), all);
  EXPECT_EQ(vocabulary.file_content(4), all);
  EXPECT_EQ(vocabulary.file_content(3), "birkhoff whitespace 1\nunknown yes\na\n\\n\n");
  const auto tokenizer = make_word_tokenizer(all, "file", 4);
  EXPECT_EQ(tokenizer->encode("<unk> b\na"), (Ids{2, 3, 1, 0}));
  EXPECT_EQ(tokenizer->decode({2, 3, 1, 0, 0}), "<unk> b\na a");
  expect_error(ExitCode::kData, [&] { tokenizer->encode("a zebra"); }, {"'zebra'", "byte 2"});
  vocabulary.add("zebra", false);
  const std::string more = "birkhoff whitespace 1\nunknown yes\na\n\\n\n<unk>\nb\n";
  EXPECT_EQ(vocabulary.file_content(5), more);
  const auto knows_unknown = make_word_tokenizer(more, "file", 6);  // and an end mark
  std::string unknown;
  EXPECT_EQ(knows_unknown->encode("a zebra gnu\n", &unknown), (Ids{0, 4, 4, 1}));
  EXPECT_EQ(unknown, "zebra\xffgnu\xff");
  for (const std::string content :
       {"birkhoff whitespace 1\n", "birkhoff whitespace 1\nunknown maybe\na\n",
        "birkhoff whitespace 1\nunknown no\na\na\n", "birkhoff whitespace 1\nunknown no\na"}) {
    expect_error(ExitCode::kData, [&] { make_word_tokenizer(content, "the-file", 2); },
                 {"the-file"});
  }
}

// The texts of ids and of unknown tokens are the text again.
TEST(Tokenizers, LoseNoTextOfUnknownTokens) {
  const std::string words = "birkhoff words 1\n over\n",
                    chars = "birkhoff chars 1\nunknown yes\n61\n";
  for (const auto& tokenizer :
       {make_word_tokenizer(words, "words", 2), make_char_tokenizer(chars, "chars", 2),
        load_tokenizer("bytes", "", 256)}) {
    std::string unknown, together;
    const Ids ids = tokenizer->encode(kText, &unknown);
    std::string_view rest = unknown;
    for (const std::int32_t id : ids) {
      const auto known = tokenizer->text_of(id);
      together += known ? *known : std::string(rest.substr(0, rest.find('\xff')));
      if (!known) rest.remove_prefix(rest.find('\xff') + 1);
    }
    EXPECT_EQ(together, kText);
    EXPECT_EQ(rest, "");
    EXPECT_EQ(tokenizer->encode(kText), ids);
  }
}

TEST(WordTokenizer, DamagedFilesAreRefused) {
  for (const std::string content :
       {"", "birkhoff words 2\na\n", "birkhoff words 1\na", "birkhoff words 1\n\n",
        "birkhoff words 1\n\\x\n", "birkhoff words 1\na\\\n", "birkhoff words 1\na\na\n",
        "birkhoff words 1\na\nb\nc\n"}) {
    expect_error(ExitCode::kData, [&] { make_word_tokenizer(content, "the-file", 2); },
                 {"the-file"});
  }
}

std::string varied_text() {
  std::string text;
  std::mt19937 random(2);
  const std::vector<std::string> words = {"static", "const",   "int",     "return", "value",
                                          "list",   "include", "pointer", "buffer", "size"};
  for (int line = 0; line < 400; ++line) {
    for (int i = 0; i < 6; ++i) text += words[random() % words.size()] + (random() % 3 ? " " : "_");
    text += std::to_string(random() % 1000) + ";\n";
  }
  return text;
}

TEST(SentencePieceTokenizer, TrainsLoadsAndRoundTripsBesideProtobuf) {
  // First parses a message with our own Protobuf, because the library brings another one.
  expect_error(ExitCode::kData, [] { parse_corpus_manifest("{\"format\": \"x\"}", "m"); },
               {"format"});
  LineSampler sampler(1 << 20);
  sampler.add(varied_text());
  const std::string model = train_sentencepiece(sampler.lines(), 320);
  EXPECT_EQ(train_sentencepiece(sampler.lines(), 320), model);
  const SentencePieceModel info = check_sentencepiece_model(model, "model");
  EXPECT_EQ(info.num_pieces, 320);
  EXPECT_EQ(info.end_of_document, 1);
  const auto tokenizer = make_sentencepiece_tokenizer(model, "model", 320);
  const Ids ids = tokenizer->encode(kText);
  EXPECT_EQ(tokenizer->decode(ids), kText);
  for (const std::int32_t id : ids) EXPECT_TRUE(id >= 0 && id < 320);
  const std::string known = "static const int value";
  EXPECT_LT(tokenizer->encode(known).size(), known.size() / 2);
  Ids with_mark = tokenizer->encode(known);
  with_mark.push_back(1);
  EXPECT_EQ(tokenizer->decode(with_mark), known);
  expect_error(ExitCode::kData, [&] { make_sentencepiece_tokenizer(model, "model", 400); },
               {"model", "400"});
  expect_error(ExitCode::kUsage, [&] { train_sentencepiece({"abc"}, 5000); },
               {"--vocab-size 5000"});
  try {
    train_sentencepiece({"abcdefghijklmnopqrstuvwxyz"}, 270);
    ADD_FAILURE() << "fewer pieces than bytes and letters";
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()).find("--character_coverage"), std::string::npos)
        << error.what();
  }
}

TEST(SentencePieceTokenizer, DamagedModelsAreRefused) {
  LineSampler sampler(1 << 20);
  sampler.add(varied_text());
  const std::string model = train_sentencepiece(sampler.lines(), 300);
  expect_error(ExitCode::kData, [] { check_sentencepiece_model("", "m"); }, {"m"});
  expect_error(ExitCode::kData, [] { check_sentencepiece_model("not a model", "m"); }, {"m"});
  std::mt19937 random(3);
  const char* told = std::getenv("BIRKHOFF_DAMAGED_MODELS");
  const int num_trials = told == nullptr ? 30 : std::atoi(told);
  for (int trial = 0; trial < num_trials; ++trial) {  // refused or usable, but never a crash
    std::string damaged = model;
    damaged[random() % damaged.size()] ^= static_cast<char>(1 << random() % 8);
    if (trial % 3 == 0) damaged.resize(random() % damaged.size());
    try {
      check_sentencepiece_model(damaged, "m");
    } catch (const Error& error) {
      ASSERT_EQ(static_cast<int>(error.code()), static_cast<int>(ExitCode::kData)) << error.what();
    }
  }
  std::printf("damaged models: tried %d, survived %d, lost 0\n", num_trials, num_trials);
}

TEST(LineSampler, IsBoundedAndSpreadOverTheText) {
  LineSampler sampler(25000);
  for (int i = 0; i < 10000; ++i) sampler.add(fmt::format("line {:05}\n", i));
  std::size_t bytes = 0;
  int late = 0;
  for (const std::string& line : sampler.lines()) {
    bytes += line.size() + 40;  // 10 bytes, in a container: a string and a hash
    late += std::stoi(line.substr(5)) >= 5000;
  }
  EXPECT_LE(bytes, 25000u);
  EXPECT_GE(bytes, 10000u);
  EXPECT_NEAR(late, static_cast<double>(sampler.lines().size()) / 2,
              4 * std::sqrt(static_cast<double>(sampler.lines().size()) / 4));
}

TEST(LineSampler, CutsLongLinesBetweenCharacters) {
  LineSampler sampler(1 << 20);
  std::string line;
  for (int i = 0; i < 1000; ++i) line += "\u20ac";  // 3000 bytes
  sampler.add("a\n\nb\n" + line);
  const std::vector<std::string> lines = sampler.lines();
  ASSERT_EQ(lines.size(), 4u);
  EXPECT_EQ(lines[2].size(), 2046u);
  EXPECT_EQ(lines[2] + lines[3], line);
}

}  // namespace
}  // namespace birkhoff
