// The text behind targets; a model that knows less text never gets better metrics.
#include "data/loader/target_counts.h"

#include <gtest/gtest.h>
#include <sentencepiece_trainer.h>

#include <cmath>
#include <numbers>

#include "cluster/base/text/utf8.h"
#include "data/corpus/manifest.h"
#include "data/corpus/verify.h"
#include "data/loader/bigram.h"
#include "tests/data/prepare_helpers.h"

namespace birkhoff {
namespace {

constexpr std::int64_t kAll = 1 << 20;  // windows

// Text of `count` words; word k of `different` comes up with probability proportional to 1 / k.
std::string zipf_words(int count, int different, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<double> weights;
  for (int k = 1; k <= different; ++k) weights.push_back(1.0 / k);
  std::discrete_distribution<int> rank(weights.begin(), weights.end());
  std::string text;
  for (int i = 0; i < count; ++i) {
    text += fmt::format("w{:x}", 17 * rank(random));
    text += i % 12 == 11 ? "\n" : " ";
  }
  return text;
}

// Chinese: no spaces between words.
std::string zipf_characters(int count, int different, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<double> weights;
  for (int k = 1; k <= different; ++k) weights.push_back(1.0 / k);
  std::discrete_distribution<int> rank(weights.begin(), weights.end());
  std::string text;
  for (int i = 0; i < count; ++i) {
    append_utf8(static_cast<std::uint32_t>(0x4e00 + rank(random)), text);
    if (i % 40 == 39) text += '\n';
  }
  return text;
}

// A SentencePiece model with spm_train's defaults, except that it keeps the text.
std::string character_model(const std::vector<std::string>& lines) {
  std::string model;
  struct Lines final : sentencepiece::SentenceIterator {
    explicit Lines(const std::vector<std::string>& all) : lines(all) {}
    bool done() const override { return next == lines.size(); }
    void Next() override { ++next; }
    const std::string& value() const override { return lines[next]; }
    sentencepiece::util::Status status() const override { return {}; }
    const std::vector<std::string>& lines;
    std::size_t next = 0;
  } iterator(lines);
  const auto status =
      sentencepiece::SentencePieceTrainer::Train({{"model_type", "char"},
                                                  {"vocab_size", "9"},
                                                  {"character_coverage", "1"},
                                                  {"normalization_rule_name", "identity"},
                                                  {"remove_extra_whitespaces", "false"},
                                                  {"minloglevel", "3"}},
                                                 &iterator, &model);
  if (!status.ok()) throw std::runtime_error(status.ToString());
  return model;
}

class TargetCountsTest : public testing::Test {
 protected:
  // Prepares a corpus of official splits.
  Corpus prepare(const std::string& train, const std::string& valid, const std::string& tokenizer,
                 std::int64_t vocab_size = 0) {
    const std::string out = folder_ / fmt::format("corpus-{}", num_corpora_++);
    write_text(out + ".train", train);
    write_text(out + ".valid", valid);
    PrepareOptions options = prepare_options(out, {out + ".train"}, tokenizer);
    options.valid_paths = {out + ".valid"};
    options.vocab_size = vocab_size;
    prepare_corpus(options);
    Corpus corpus(out);
    verify_corpus(corpus);
    return corpus;
  }

  // The corpus as earlier versions left it: without the counts of tokens.
  static Corpus earlier(const Corpus& corpus) {
    configs::CorpusManifest manifest = corpus.manifest();
    for (auto& split : *manifest.mutable_split()) {
      split.clear_unknown_text();
      split.mutable_counts()->clear_unknown_tokens();
      split.mutable_counts()->clear_unknown_bytes();
      split.mutable_counts()->clear_changed_bytes();
      split.mutable_counts()->clear_added_spaces();
    }
    write_file_durably((corpus.folder() / kCorpusManifestName).string(), manifest_json(manifest));
    return Corpus(corpus.folder());
  }

  static TargetCounts count(const Corpus& corpus, std::int64_t length, std::int64_t num_windows,
                            bool restart = false) {
    return count_targets(
        corpus, {.split = "valid", .sequence_length = length, .restart_at_documents = restart},
        num_windows);
  }

  TemporaryFolder folder_;
  int num_corpora_ = 0;
};

TEST_F(TargetCountsTest, AreThoseOfThePredictedTextByHand) {
  // Words: "b", " a", "\n" are known, and " <unk>" stands for the rest.
  const Corpus corpus = prepare("b a a\nb a\n", "b a zebra\n a\tb\n", "words", 4);
  // b| a zebra\n a|\t|b|\n: the first word is no target; the vocabulary is <unk>, " a", "\n", "b".
  const TargetCounts all = count(corpus, 3, kAll);
  EXPECT_EQ(all.tokens, 7);
  EXPECT_EQ(all.bytes, 14);  // of 15
  EXPECT_EQ(all.characters, 14);
  EXPECT_EQ(all.unknown_tokens, 2);
  EXPECT_EQ(all.unknown_bytes, 6 + 1);  // " zebra" and the tab
  EXPECT_EQ(all.words, 4);              // a zebra a b
  EXPECT_EQ(all.line_ends, 2);
  EXPECT_EQ(all.no_bytes + all.no_words, "");
  const TargetCounts first = count(corpus, 3, 1);
  EXPECT_EQ(first.tokens, 3);
  EXPECT_EQ(first.bytes, 9);  // " a zebra\n"
  EXPECT_EQ(first.words, 2);
  EXPECT_EQ(first.unknown_bytes, 6);
  // 8 bits for each byte of an unknown token and for its end.
  const double nats = 10;
  EXPECT_DOUBLE_EQ(*all.bits_per_byte(nats), (nats / std::numbers::ln2 + 8 * (7 + 2)) / 14);
  const double total = nats + 8 * (7 + 2) * std::numbers::ln2;
  EXPECT_DOUBLE_EQ(*all.word_perplexity(nats), std::exp(total / 4));
  EXPECT_DOUBLE_EQ(*all.word_and_line_perplexity(nats), std::exp(total / 6));
  const auto& counts = corpus.split("valid").counts();
  EXPECT_EQ(counts.unknown_tokens(), 2);
  EXPECT_EQ(counts.unknown_bytes(), 7);
  EXPECT_EQ(corpus.split("train").counts().unknown_tokens(), 0);
  EXPECT_NE(describe_corpus(corpus).find("unknown tokens: 2 (25 %), 7 bytes"), std::string::npos)
      << describe_corpus(corpus);
}

// Against the raw text, for every tokenizer: windows that end anywhere, and documents with and
// without end marks and restarts.
TEST_F(TargetCountsTest, NeverHoldBytesThatAreNotPredicted) {
  const std::string train = zipf_words(3000, 300, 1), one = zipf_words(400, 600, 2);
  for (const std::string tokenizer : {"bytes", "chars", "words", "sentencepiece"}) {
    SCOPED_TRACE(tokenizer);
    const std::int64_t ids = tokenizer == "words" ? 40 : tokenizer == "sentencepiece" ? 320 : 0;
    const Corpus single = prepare(train, one, tokenizer, ids);
    // Several documents in the ids of the single one have no end mark.
    PrepareOptions options = prepare_options(folder_ / (tokenizer + "-many"),
                                             {single.folder().string() + ".train"}, tokenizer);
    options.like.emplace(TokenizerSource{.kind = tokenizer,
                                         .file = single.tokenizer_file().string(),
                                         .vocabulary = single.vocabulary()});
    std::vector<std::string> documents;
    for (unsigned i = 0; i < 30; ++i) {
      documents.push_back(zipf_words(static_cast<int>(i % 5) + 1, 600, i));
      documents.back().pop_back();  // so that words end only with the document
      write_text(folder_ / fmt::format("{}-valid/{:02}", tokenizer, i), documents.back());
    }
    options.valid_paths = {folder_ / (tokenizer + "-valid")};
    prepare_corpus(options);
    const Corpus many(options.out);
    for (const Corpus* corpus : {&single, &many}) {
      const std::int64_t tokens = corpus->stream("valid", "tokens").elements();
      for (const bool restart : {false, true}) {
        // The sums of the windows are those of the whole, and the mask says what is a target.
        const auto source = evaluation_windows(
            *corpus, {.split = "valid", .sequence_length = 7, .restart_at_documents = restart});
        std::int64_t targets = 0, bytes_before = 0;
        for (std::int64_t i = 0; i < source->num_samples(); ++i) {
          const Batch batch = read_samples(*source, i, i + 1);
          const auto* mask = batch.at(field::kMask).const_data_ptr<std::uint8_t>();
          targets += std::count(mask, mask + 7, 1);
          const TargetCounts counts = count(*corpus, 7, i + 1, restart);
          ASSERT_EQ(counts.tokens, targets) << i;
          ASSERT_GE(counts.bytes, bytes_before);
          bytes_before = counts.bytes;
        }
        const TargetCounts whole = count(*corpus, tokens, 1, restart);
        EXPECT_EQ(whole.tokens, targets);
        EXPECT_EQ(whole.bytes, bytes_before);
        EXPECT_EQ(whole.no_bytes, "");
        const auto& counts = corpus->split("valid").counts();
        if (tokenizer != "bytes") continue;
        const bool starts_hidden = corpus == &many && restart;
        EXPECT_EQ(whole.bytes, counts.bytes() - (starts_hidden ? 30 : 1));
        EXPECT_EQ(whole.characters, counts.characters() - (starts_hidden ? 30 : 1));
        EXPECT_EQ(whole.words, counts.words() - (starts_hidden ? 30 : 1));
      }
    }
  }
}

TEST_F(TargetCountsTest, ACharacterCountsWhereItBegins) {
  // As bytes: \xc3 \xa9 | \xe4 \xb8 \xad | a \xf0 \x9f \x8e \xb2; the first byte is no target.
  const Corpus corpus = prepare("bytes\n", "\u00e9\u4e2da\U0001f3b2", "bytes", 0);
  const TargetCounts all = count(corpus, 100, kAll), first = count(corpus, 2, 1);
  EXPECT_EQ(all.bytes, 9);
  EXPECT_EQ(all.characters, 3);
  EXPECT_EQ(first.bytes, 2);
  EXPECT_EQ(first.characters, 1);
  EXPECT_DOUBLE_EQ(*all.bits_per_character(5), 5 / std::numbers::ln2 / 3);
}

TEST_F(TargetCountsTest, EndMarksAndWordsAcrossDocumentsCount) {
  write_text(folder_ / "train", "b a\n");
  write_text(folder_ / "valid/1", "xy");
  write_text(folder_ / "valid/2", "z w");
  PrepareOptions options = prepare_options(folder_ / "corpus", {folder_ / "train"});
  options.valid_paths = {folder_ / "valid"};
  prepare_corpus(options);
  const Corpus corpus(options.out);
  ASSERT_TRUE(corpus.manifest().tokenizer().has_end_of_document());
  for (const bool restart : {false, true}) {  // x|y end z space w end
    const TargetCounts counts = count(corpus, 100, 1, restart);
    EXPECT_EQ(counts.tokens, 6);
    EXPECT_EQ(counts.bytes, 4);
    EXPECT_EQ(counts.words, 2);  // z and w: x, which begins the first word, is no target
  }
}

TEST_F(TargetCountsTest, AVocabularyThatKnowsLessIsNeverBetter) {
  const std::string train = zipf_words(60000, 4000, 3), valid = zipf_words(6000, 4000, 4);
  for (const std::string tokenizer : {"words", "whitespace"}) {
    double bits = std::numeric_limits<double>::infinity(), perplexity = bits;
    for (const std::int64_t ids : {30, 300, 3000}) {
      const Corpus corpus = prepare(train, valid, tokenizer, ids);
      const BigramFigures figures = bigram_figures(corpus, "valid");
      const double nats = figures.loss * static_cast<double>(figures.tokens);
      EXPECT_LT(*figures.targets.word_perplexity(nats), perplexity) << tokenizer << ids;
      perplexity = *figures.targets.word_perplexity(nats);
      if (tokenizer == "whitespace") {
        EXPECT_FALSE(figures.targets.bits_per_byte(nats));
        continue;
      }
      EXPECT_LT(*figures.targets.bits_per_byte(nats), bits) << ids;
      bits = *figures.targets.bits_per_byte(nats);
    }
  }
}

TEST_F(TargetCountsTest, NorAreFewerCharactersOrNoWordsOfChinese) {
  const std::string train = zipf_characters(60000, 600, 5), valid = zipf_characters(6000, 600, 6);
  const auto bits_of = [](const Corpus& corpus) {
    const BigramFigures figures = bigram_figures(corpus, "valid");
    return *figures.targets.bits_per_byte(figures.loss * static_cast<double>(figures.tokens));
  };
  std::string few = "birkhoff chars 1\nunknown yes\na\n";
  for (int c = 0; c < 20; ++c) few += fmt::format("{:x}\n", 0x4e00 + c);
  write_text(folder_ / "few.chars", few);
  const double of_all = bits_of(prepare(train, valid, "chars"));
  EXPECT_LT(of_all, bits_of(prepare(train, valid, folder_ / "few.chars")));
  const Corpus words = prepare(train, valid, "words", 3000);  // runs of 40 characters, all unknown
  EXPECT_GT(words.split("valid").counts().unknown_tokens(), 100);
  EXPECT_LT(of_all, bits_of(words));
}

TEST_F(TargetCountsTest, EarlierCorporaAreReadAndTheirFiguresWithheld) {
  const Corpus words = prepare("b a a\nb a\n", "b a zebra\n", "words", 4);
  const std::string fingerprint = words.manifest().fingerprint();
  const Corpus old_words = earlier(words);
  EXPECT_EQ(old_words.manifest().fingerprint(), fingerprint);  // runs can resume with either
  const TargetCounts counts = count(old_words, 100, 1);
  EXPECT_EQ(counts.unknown_tokens, 1);
  EXPECT_NE(counts.no_bytes.find("earlier version"), std::string::npos) << counts.no_bytes;
  EXPECT_EQ(counts.no_words, counts.no_bytes);
  EXPECT_FALSE(counts.bits_per_byte(1) || counts.word_perplexity(1) ||
               counts.word_and_line_perplexity(1));
  EXPECT_NE(describe_corpus(old_words).find("unknown tokens: not counted"), std::string::npos);
  // Nothing is missing where nothing is unknown.
  EXPECT_EQ(count(earlier(prepare("b a a\nb a\n", "b a a\n", "words", 5)), 100, 1).bytes, 5);
  EXPECT_EQ(count(earlier(prepare("ba\n", "ab\n", "chars")), 100, 1).bytes, 2);
  EXPECT_EQ(count(earlier(prepare("ba\n", "ab\n", "bytes")), 100, 1).no_bytes, "");
  const std::string text = sentences(60, 1);
  const Corpus pieces = prepare(text, text, "sentencepiece", 320);
  EXPECT_EQ(count(pieces, 100, kAll).no_bytes, "");
  EXPECT_NE(count(earlier(pieces), 100, kAll).no_bytes.find("earlier version"), std::string::npos);
}

TEST_F(TargetCountsTest, ModelsThatChangeTheTextAreFound) {
  const std::string text = sentences(60, 1), wide = text + "two  spaces\n";
  const Corpus own = prepare(text, wide, "sentencepiece", 320);
  EXPECT_EQ(count(own, 100, kAll).no_bytes, "");
  const std::string model = read_text(own.tokenizer_file().string());
  // NormalizerSpec: fields 3 and 4 add a space in front, and fold spaces.
  const std::size_t flags = model.find(std::string("\x18\x00\x20\x00", 4), model.find("identity"));
  ASSERT_NE(flags, std::string::npos);
  const auto with_flag = [&](std::size_t at) {
    std::string changed = model;
    changed[flags + at] = 1;
    write_text(folder_ / "changed.model", changed);
    return prepare(text, wide, folder_ / "changed.model");
  };
  const Corpus prefixed = with_flag(1);
  EXPECT_EQ(prefixed.split("valid").counts().added_spaces(), 1);
  const TargetCounts counts = count(prefixed, 100, kAll);
  EXPECT_EQ(counts.no_bytes, "");
  EXPECT_LE(counts.bytes, static_cast<std::int64_t>(wide.size()));
  const Corpus folded = with_flag(3);
  EXPECT_EQ(folded.split("valid").counts().changed_bytes(), static_cast<std::int64_t>(wide.size()));
  EXPECT_NE(count(folded, 100, kAll).no_bytes.find("changes the text"), std::string::npos);
  EXPECT_FALSE(count(folded, 100, kAll).word_perplexity(1));
  EXPECT_NE(describe_corpus(folded).find("changed by the model"), std::string::npos);
}

// A model of characters without byte pieces, which adds a space in front: x, z and the line end are
// unknown to it.
TEST_F(TargetCountsTest, WindowsOfAModelThatAddsSpacesCountTheRawText) {
  const std::string raw = "ab c\n";
  write_text(folder_ / "model", character_model({"ab c de", "de ab c"}));
  write_text(folder_ / "train", raw);
  for (int i = 0; i < 3; ++i) write_text(folder_ / fmt::format("valid/{}", i), raw.substr(i));
  PrepareOptions options = prepare_options(folder_ / "corpus", {folder_ / "train"}, "bytes");
  options.tokenizer = folder_ / "model";
  options.valid_paths = {folder_ / "valid"};
  prepare_corpus(options);
  const Corpus corpus(folder_ / "corpus");
  verify_corpus(corpus);
  EXPECT_EQ(corpus.split("valid").counts().added_spaces(), 3);
  // Tokens, "_" being a space: _ a b _ c ? $  _ b _ c ? $  _ _ c ? $. The first is no target, the
  // end mark $ and the space in front of a document stand for no text.
  const std::vector<std::int64_t> bytes_of_token = {1, 1, 1, 1, 1, 0, 0, 1, 1,
                                                    1, 1, 0, 0, 1, 1, 1, 0};
  std::int64_t bytes = 0;
  for (std::size_t k = 0; k < bytes_of_token.size(); ++k) {
    bytes += bytes_of_token[k];
    const TargetCounts counts = count(corpus, 1, static_cast<std::int64_t>(k + 1));
    EXPECT_EQ(counts.bytes, bytes) << k;
    EXPECT_EQ(counts.no_bytes, "");
  }
  const TargetCounts all = count(corpus, 1, kAll);
  EXPECT_EQ(all.tokens, static_cast<std::int64_t>(bytes_of_token.size()));
  EXPECT_EQ(all.unknown_tokens, 3);
  EXPECT_EQ(all.unknown_bytes, 3);
  EXPECT_EQ(corpus.split("train").counts().unknown_tokens(), 1);
  EXPECT_TRUE(corpus.split("train").has_unknown_text()) << "eval --split train, eval --text";
}

TEST_F(TargetCountsTest, TextWithoutTokensIsAnError) {
  expect_error(ExitCode::kData, [&] { prepare("a b\n", "  \t", "whitespace"); },
               {".valid", "white space"});
}

TEST_F(TargetCountsTest, TextThatIsMissingIsAnError) {
  const Corpus corpus = prepare("b a a\nb a\n", "b a zebra quagga\n", "words", 4);
  configs::CorpusManifest manifest = corpus.manifest();
  auto& split = *manifest.mutable_split(1);
  ASSERT_TRUE(split.has_unknown_text());
  auto& counts = *split.mutable_counts();
  counts.set_unknown_bytes(counts.unknown_bytes() - 1);
  expect_error(ExitCode::kData, [&] { parse_corpus_manifest(manifest_json(manifest), "manifest"); },
               {"unknown_text", "rows"});
}

// Of pairs only the targets count, and of long ones only what is predicted.
TEST(PairTargets, AreTheTextOfTargets) {
  const TemporaryFolder folder;
  const std::vector<std::string> sources = {"one two three", "four", "five six"};
  const std::vector<std::string> targets = {"eins zwei", "vier", "f\xc3\xbcnf sechs!"};
  prepare_corpus(pair_options(folder, sources, targets));
  const Corpus corpus(folder / "corpus");
  const PairOptions all{.source_length = 99, .target_length = 99};
  const TargetCounts counts = count_pair_targets(corpus, all, 3);
  EXPECT_EQ(counts.tokens, 9 + 4 + 12 + 3);  // and end marks
  EXPECT_EQ(counts.bytes, 9 + 4 + 12);
  EXPECT_EQ(counts.words, 2 + 1 + 2);
  EXPECT_EQ(counts.unknown_tokens, 0);
  EXPECT_NEAR(*counts.bits_per_byte(25 * std::numbers::ln2), 1, 1e-12);
  const TargetCounts two = count_pair_targets(corpus, all, 2);
  EXPECT_EQ(two.tokens, 9 + 4 + 2);
  EXPECT_EQ(two.bytes, 9 + 4);
  const TargetCounts cut = count_pair_targets(corpus, {.source_length = 2, .target_length = 5}, 3);
  EXPECT_EQ(cut.tokens, 5 + 5 + 5);
  EXPECT_EQ(cut.bytes, 5 + 4 + 5);
  EXPECT_EQ(cut.words, 1 + 1 + 1);
}

// The text of unknown tokens follows the targets, also those that are cut.
TEST(PairTargets, UnknownWordsCostTheirText) {
  const TemporaryFolder folder;
  PrepareOptions options =
      pair_options(folder, {"a b", "b a"}, {"known word known", "word known word"}, "words");
  write_text(folder / "v.source", "a\nb\n");
  write_text(folder / "v.target", "known unseenA word\nsecond known\n");
  options.valid_paths = {folder / "v.source"};
  options.valid_target_paths = {folder / "v.target"};
  prepare_corpus(options);
  const Corpus corpus(folder / "corpus");
  const auto counts = [&](std::int64_t length) {
    return count_pair_targets(corpus,
                              {.split = "valid", .source_length = 9, .target_length = length}, 2);
  };
  EXPECT_EQ(counts(99).unknown_tokens, 2);
  EXPECT_EQ(counts(99).unknown_bytes, 8 + 6);  // " unseenA", "second"
  EXPECT_EQ(counts(1).unknown_tokens, 1);
  EXPECT_EQ(counts(1).unknown_bytes, 6);
}

}  // namespace
}  // namespace birkhoff
