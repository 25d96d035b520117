#include "data/tokenizers/text_decoder.h"

#include <gtest/gtest.h>

#include <random>

#include "cluster/base/text/utf8.h"
#include "data/tokenizers/sentencepiece_tokenizer.h"
#include "data/tokenizers/tokenizer_file.h"

namespace birkhoff {
namespace {

using Ids = std::vector<std::int32_t>;

// A tokenizer with pieces for ASCII and ï; everything else takes SentencePiece's byte ids.
std::unique_ptr<Tokenizer> pieces() {
  std::vector<std::string> lines;
  for (int i = 0; i < 200; ++i) lines.push_back("naïve quick fog jumps " + std::to_string(i % 7));
  const std::string model = train_sentencepiece(lines, 300);
  return make_sentencepiece_tokenizer(model, "model", 300);
}

struct Kind {
  std::string name;
  std::unique_ptr<Tokenizer> tokenizer;
};

std::vector<Kind> kinds() {
  std::vector<Kind> kinds;
  kinds.push_back({"bytes", load_tokenizer("bytes", "", 257)});
  kinds.push_back(
      {"chars", make_char_tokenizer("birkhoff chars 1\nunknown yes\n61\nef\n4f60\n", "file", 4)});
  kinds.push_back(
      {"words", make_word_tokenizer("birkhoff words 1\nna\xc3\xafve\n fog\n", "file", 3)});
  kinds.push_back({"pieces", pieces()});
  return kinds;
}

TEST(TextDecoder, PartsAreTheWholeText) {
  std::mt19937 random(1);
  for (const auto& [name, tokenizer] : kinds()) {
    SCOPED_TRACE(name);
    for (int i = 0; i < 200; ++i) {
      Ids ids;
      for (int n = 0; n < 50; ++n)
        ids.push_back(
            static_cast<std::int32_t>(random() % static_cast<unsigned>(tokenizer->vocabulary())));
      TextDecoder decoder(*tokenizer, {});
      std::string text;
      for (const std::int32_t id : ids) text += decoder.add(id);
      text += decoder.finish();
      ASSERT_EQ(text, tokenizer->decode(ids));
    }
  }
}

TEST(TextDecoder, CharactersComeWhole) {
  const std::string text = "naïve 你好 \U0001f600 fog";
  for (const auto& [name, tokenizer] : kinds()) {
    if (name != "bytes" && name != "pieces") continue;
    SCOPED_TRACE(name);
    const Ids ids = tokenizer->encode(text);
    TextDecoder decoder(*tokenizer, {});
    std::string all;
    int num_waiting = 0;
    for (const std::int32_t id : ids) {
      const std::string part = decoder.add(id);
      EXPECT_EQ(find_invalid_utf8(part), std::string::npos) << part;
      EXPECT_EQ(part.find("\ufffd"), std::string::npos) << part;
      num_waiting += part.empty() ? 1 : 0;
      all += part;
    }
    EXPECT_EQ(all, text);
    EXPECT_EQ(decoder.finish(), "");
    EXPECT_GE(num_waiting, 7) << "two Chinese characters and an emoji take 10 bytes";
  }
}

// The decoder stops waiting as soon as the bytes can no longer become a character.
TEST(TextDecoder, WhatCannotBecomeACharacterIsNotHeldBack) {
  const auto bytes = load_tokenizer("bytes", "", 257);
  TextDecoder decoder(*bytes, {});
  EXPECT_EQ(decoder.add(0xe4), "");
  EXPECT_EQ(decoder.add('a'),
            "\xe4"
            "a");
  EXPECT_EQ(decoder.add(0xbd), "\xbd");
  EXPECT_EQ(decoder.add(0xf0), "");
  EXPECT_EQ(decoder.add(0x9f), "");
  EXPECT_EQ(decoder.add(256), "\xf0\x9f") << "the end of a document";
  EXPECT_EQ(decoder.add(0xe4), "");
  EXPECT_EQ(decoder.finish(), "\xe4");
  EXPECT_EQ(decoder.finish(), "");
}

// Only the text of the new ids is returned.
TEST(TextDecoder, FollowsWhatWasThere) {
  for (const auto& [name, tokenizer] : kinds()) {
    if (name == "chars" || name == "words") continue;
    SCOPED_TRACE(name);
    const Ids before = tokenizer->encode("quick "), ids = tokenizer->encode("fog jumps");
    TextDecoder decoder(*tokenizer, before);
    std::string text;
    for (const std::int32_t id : ids) text += decoder.add(id);
    EXPECT_EQ(text, "fog jumps");
  }
}

}  // namespace
}  // namespace birkhoff
