// Generated corpora: their bytes do not depend on threads, and their statistics are those of the
// data sets that they stand for.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <set>

#include "data/corpus/label_reader.h"
#include "data/corpus/shard_format.h"
#include "data/corpus/shard_reader.h"
#include "data/corpus/verify.h"
#include "data/generate/generate.h"
#include "data/generate/generated_images.h"
#include "data/generate/generated_text.h"
#include "data/prepare/text_counts.h"
#include "tests/data/prepare_helpers.h"

namespace birkhoff {
namespace {

GenerationOptions generation(const std::string& out, const std::string& name, double scale,
                             int threads) {
  GenerationOptions options;
  options.out = out;
  options.name = name;
  options.scale = scale;
  options.threads = threads;
  options.shard_images = 100;
  options.shard_tokens = 5000;
  return options;
}

TEST(Generate, ThreadsDoNotChangeABit) {
  TemporaryFolder folder;
  for (const std::string& name : generated_names()) {
    const double scale = name == "lm1b" ? 1e-4 : 5e-4;
    EXPECT_TRUE(generate_corpus(generation(folder / name + "-1", name, scale, 1)));
    EXPECT_TRUE(generate_corpus(generation(folder / name + "-3", name, scale, 3)));
    EXPECT_TRUE(content_of(folder / name + "-1") == content_of(folder / name + "-3")) << name;
    verify_corpus(Corpus(folder / name + "-3"));
    // The same command finds its work done, another one is refused.
    GenerationOptions again = generation(folder / name + "-3", name, scale, 1);
    EXPECT_FALSE(generate_corpus(again));
    again.seed = 2;
    expect_error(ExitCode::kUsage, [&] { generate_corpus(again); },
                 {folder / name + "-3", "generated " + name, "seed 1"});
    GenerationOptions other = again;
    other.out = folder / name + "-other";
    EXPECT_TRUE(generate_corpus(other));
    EXPECT_NE(Corpus(other.out).manifest().fingerprint(),
              Corpus(again.out).manifest().fingerprint());
  }
}

TEST(Generate, LeftoversOfAKilledCommandAreReplaced) {
  TemporaryFolder folder;
  write_text(folder / "corpus/.unfinished", "");
  write_text(folder / "corpus/train-image-00000.h5", "a part of one");
  write_text(folder / "corpus/train-image-00007.h5.tmp", "");
  generate_corpus(generation(folder / "corpus", "imagenet64", 1e-4, 1));
  verify_corpus(Corpus(folder / "corpus"));
  EXPECT_EQ(list_directory(folder / "corpus"),
            (std::vector<std::string>{"manifest.json", "train-image-00000.h5",
                                      "train-image-00001.h5", "train-label-00000.h5",
                                      "valid-image-00000.h5", "valid-label-00000.h5"}));
}

TEST(Generate, ImagesAreFoundByTheirNumber) {
  namespace images = generated_images;
  TemporaryFolder folder;
  generate_corpus(generation(folder / "corpus", "imagenet64", 1e-3, 2));
  const Corpus corpus(folder / "corpus");
  const auto& record = corpus.record("valid", "image");
  EXPECT_EQ(corpus.record("train", "image").rows(), 1281);
  ASSERT_EQ(record.rows(), 50);
  ASSERT_EQ(shard_format::row_bytes(record), images::kBytes);
  ShardSequence reader(corpus, record);
  std::vector<char> row(images::kBytes);
  std::vector<std::uint8_t> image(images::kBytes);
  reader.read_bytes(17, 1, row.data());
  images::make_image(/*seed=*/1, 1281 + 17, image.data());  // valid follows train
  EXPECT_TRUE(std::equal(image.begin(), image.end(), row.begin(),
                         [](std::uint8_t a, char b) { return a == static_cast<std::uint8_t>(b); }));
  std::vector<std::int64_t> labels(50);
  LabelReader(corpus, "valid", "label").read(0, 50, labels.data());
  EXPECT_EQ(labels[17], images::class_of(1, 1281 + 17));

  // Neighboring values are near each other, values of different images are not.
  std::vector<std::uint8_t> other(images::kBytes);
  images::make_image(1, 5, other.data());
  double nearby = 0, between = 0;
  for (std::int64_t i = 3; i < images::kBytes; ++i) {
    nearby += std::abs(image[static_cast<std::size_t>(i)] - image[static_cast<std::size_t>(i - 3)]);
    between += std::abs(image[static_cast<std::size_t>(i)] - other[static_cast<std::size_t>(i)]);
  }
  EXPECT_LT(4 * nearby, between);
}

TEST(Generate, SentencesHaveTheLengthsAndWordsOfLm1b) {
  const GeneratedText text(/*seed=*/3);
  constexpr std::int64_t kSentences = 40000;
  double words = 0, squares = 0, first = 0, rare = 0, shares = 0;
  std::vector<std::int32_t> ids;
  for (std::int64_t i = 0; i < kSentences; ++i) {
    const auto length = static_cast<double>(text.length(i));
    ids.clear();
    text.append_sentence(i, ids);
    ASSERT_EQ(std::ssize(ids), text.length(i) + 1);
    ASSERT_EQ(ids.back(), GeneratedText::kEndOfSentence);
    words += length;
    squares += length * length;
    for (std::size_t w = 0; w + 1 < ids.size(); ++w) {
      ASSERT_TRUE(ids[w] >= 0 && ids[w] < GeneratedText::kWords);
      first += ids[w] == 0;
      rare += ids[w] >= 10000;
    }
  }
  const double mean = words / kSentences;
  EXPECT_NEAR(mean, 25.4, 0.3);  // four standard errors
  EXPECT_NEAR(std::sqrt(squares / kSentences - mean * mean), 13.2, 0.4);
  double rare_shares = 0;
  for (std::int64_t id = GeneratedText::kWords; id-- > 0;) {
    const double share = 1 / (static_cast<double>(id) + 3.7);
    shares += share;
    if (id >= 10000) rare_shares += share;
  }
  for (const auto& [count, share] :
       {std::pair(first, 1 / 3.7 / shares), std::pair(rare, rare_shares / shares)}) {
    EXPECT_NEAR(count / words, share, 4 * std::sqrt(share * (1 - share) / words));
  }
}

TEST(Generate, WordsDifferAndHaveTheirLengths) {
  std::set<std::string> words;
  std::size_t longest = 0;
  for (std::int64_t id = 0; id < GeneratedText::kWords; ++id) {
    const std::string word = GeneratedText::word(id);
    ASSERT_EQ(std::ssize(word), GeneratedText::word_bytes(id));
    ASSERT_GE(word.size(), longest) << id;  // rare words are no shorter
    longest = word.size();
    words.insert(word);
  }
  EXPECT_EQ(std::ssize(words), GeneratedText::kWords);
}

// The tokens are those of the text, and the counts are the text's.
TEST(Generate, TextIsTheTextOfItsTokens) {
  TemporaryFolder folder;
  generate_corpus(generation(folder / "corpus", "lm1b", 1e-4, 2));
  const Corpus corpus(folder / "corpus");
  const auto& split = corpus.split("train");
  ASSERT_GT(split.stream(0).shard_size(), 10);
  EXPECT_EQ(split.counts().documents(), 3030);
  const GeneratedText text(1);
  std::vector<std::int32_t> ids;
  for (std::int64_t i = 0; i < 3030; ++i) text.append_sentence(i, ids);
  EXPECT_TRUE(tokens_of(corpus, "train") == ids);
  const auto tokenizer = corpus.tokenizer();
  TextCounter counter;
  StreamReader reader(corpus, "train", "tokens");
  for (std::int64_t i = 0; i < 3030; ++i) {
    const auto [begin, end] = reader.document(i);
    const std::vector<std::int32_t> words(ids.begin() + begin, ids.begin() + end - 1);
    const std::string sentence = tokenizer->decode(words);
    counter.add(sentence);
    counter.end_document();
    std::string unknown;
    if (i < 100) {
      ASSERT_EQ(tokenizer->encode(sentence, &unknown), words) << sentence;
    }
  }
  EXPECT_EQ(counter.counts().words(), split.counts().words());
  EXPECT_EQ(counter.counts().bytes(), split.counts().bytes());
  EXPECT_EQ(counter.counts().characters(), split.counts().characters());
  EXPECT_EQ(counter.counts().sentences(), split.counts().sentences());
}

}  // namespace
}  // namespace birkhoff
