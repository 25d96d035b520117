// BLEU has the values that sacreBLEU 2.6.0 prints. They were computed by
//   python -c 'import sacrebleu; print(sacrebleu.BLEU(tokenize=TOKENIZER)
//     .corpus_score(HYPOTHESES, REFERENCES).score)'
// tests/interop/bleu_with_sacrebleu.py compares random texts.
#include "data/scores/bleu.h"

#include <gtest/gtest.h>

#include "cluster/base/error.h"
#include "data/scores/unicode_classes.h"

namespace birkhoff {
namespace {

using Texts = std::vector<std::string>;

BleuCounts counts_of(const Texts& hypotheses, const std::vector<Texts>& references,
                     BleuTokenizer tokenizer) {
  BleuCounts counts;
  for (std::size_t i = 0; i < hypotheses.size(); ++i) {
    std::vector<std::string_view> of_segment;
    for (const Texts& texts : references) of_segment.emplace_back(texts[i]);
    counts.add(hypotheses[i], of_segment, tokenizer);
  }
  return counts;
}

struct Case {
  BleuTokenizer tokenizer;
  Texts hypotheses;
  std::vector<Texts> references;
  double score;
};

TEST(Bleu, HasTheValuesOfSacreBleu) {
  const Texts german = {"\u201eJa\u201c, sagte er \u2013 3,5 \u20ac\u2026 und l\u00e4chelte."},
              german_reference = {"\u201eNein\u201c, sagte er \u2013 3,5 \u20ac\u2026 und lachte."};
  const std::vector<Case> cases = {
      {BleuTokenizer::k13a,
       {"The cat sat on the mat.", "It's 3.5% of $1,000 - e.g. \"10-12\"."},
       {{"The cat is on the mat.", "It's 3.5% of $1,000 -- i.e. \"10-12\"."}},
       62.80169733958694},
      {BleuTokenizer::k13a,
       {"AT&amp;T said &quot;no&quot; <skipped>to a-b, x/y."},
       {{"AT&T said \"no\" to a-b, x / y."}},
       100},
      {BleuTokenizer::kIntl, german, {german_reference}, 68.12455364200612},
      {BleuTokenizer::k13a, german, {german_reference}, 66.06328636027612},
      {BleuTokenizer::kNone, {"a b c d e f"}, {{"a b c d x f"}}, 53.7284965911771},
      // No 4-gram, no match at all, and three smoothed orders.
      {BleuTokenizer::k13a, {"a b c"}, {{"a b c d e"}}, 0},
      {BleuTokenizer::k13a, {"x y z w v"}, {{"a b c d e"}}, 0},
      {BleuTokenizer::k13a, {"a q b q c q d"}, {{"a x b x c x d"}}, 9.287528999566801},
      // Two references: the first two matches count, and the shorter length of equally close ones.
      {BleuTokenizer::k13a,
       {"the the the the the the the", ""},
       {{"the cat is on the mat", "a"}, {"there is a cat on the mat today", "b c"}},
       7.809849842300637},
  };
  for (const Case& c : cases) {
    // A few operations on doubles of at most 100 differ.
    EXPECT_NEAR(counts_of(c.hypotheses, c.references, c.tokenizer).bleu().score, c.score, 1e-10)
        << c.hypotheses[0];
  }
}

TEST(Bleu, ALineIsSacreBleusExceptForItsVersion) {
  const BleuCounts counts = counts_of({"a b c"}, {{"a b c d e"}}, BleuTokenizer::k13a);
  EXPECT_EQ(bleu_line(counts, 1, BleuTokenizer::k13a),
            "BLEU|nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:birkhoff = 0.00 "
            "100.0/100.0/100.0/0.0 (BP = 0.513 ratio = 0.600 hyp_len = 3 ref_len = 5)");
}

TEST(Bleu, WordsAreThoseOfTheRules) {
  EXPECT_EQ(bleu_words("a.. 3.5, 10-12 a-b it's &lt;x&gt;", BleuTokenizer::k13a),
            (Texts{"a", ".", ".", "3.5", ",", "10", "-", "12", "a-b", "it's", "<", "x", ">"}));
  EXPECT_EQ(bleu_words("3,5\u20ac x_y \u0661.\u0662\u2026 4. ", BleuTokenizer::kIntl),
            (Texts{"3,5", "\u20ac", "x", "_", "y", "\u0661.\u0662", "\u2026", "4."}));
  EXPECT_EQ(bleu_words("\u3000a\u00a0b\x1c"
                       "c\u2028 ",
                       BleuTokenizer::kNone),
            (Texts{"a", "b", "c"}));
  EXPECT_EQ(bleu_words("", BleuTokenizer::k13a), Texts{});
  EXPECT_THROW(bleu_words("a\xff", BleuTokenizer::kNone), Error);
}

// Each class has the characters at the ends of its first and last ranges, and not their neighbors.
TEST(Bleu, CharactersAreInTheirClasses) {
  for (const std::uint32_t c : {0x21u, 0x2eu, 0xa1u, 0x2026u, 0x1e95fu}) {
    EXPECT_TRUE(is_punctuation(c) && !is_number(c) && !is_symbol(c)) << c;
  }
  for (const std::uint32_t c : {0x30u, 0x39u, 0xbdu, 0x661u, 0x1fbf9u}) {
    EXPECT_TRUE(is_number(c) && !is_punctuation(c) && !is_symbol(c)) << c;
  }
  for (const std::uint32_t c : {0x24u, 0x2bu, 0x7eu, 0x20acu, 0x1f600u}) {
    EXPECT_TRUE(is_symbol(c) && !is_punctuation(c) && !is_number(c)) << c;
  }
  for (const std::uint32_t c : {0x20u, 0x41u, 0xe4u, 0x4e00u, 0x10ffffu}) {
    EXPECT_FALSE(is_symbol(c) || is_punctuation(c) || is_number(c)) << c;
  }
}

}  // namespace
}  // namespace birkhoff
