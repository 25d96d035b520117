// BLEU of a corpus (Papineni et al. 2002), as sacreBLEU computes it (Post 2018):
//
//   BLEU = 100 BP exp(1/4 sum_{n=1..4} log p_n),   BP = min(1, exp(1 - R / C))
//
// where p_n is the share of the n-grams of all hypotheses that occur in their references, each at
// most as often as in the reference with the most; C is the number of words of the hypotheses and R
// that of the references, of each segment the one whose length is closest (the shorter of two).
// Smoothing `exp` (mteval's): the i-th order without a match has p_n = 1 / (2^i n-grams). Without a
// single match, or an n-gram of each order, BLEU is 0.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "data/scores/bleu_words.h"

namespace birkhoff {

inline constexpr int kBleuOrders = 4;

struct Bleu {
  double score = 0;                              // 0 to 100
  std::array<double, kBleuOrders> precisions{};  // 100 p_1 to 100 p_4
  double brevity_penalty = 0;
};

// The counts of which BLEU is a function. They are integers, so sums over ranks are exact.
struct BleuCounts {
  std::array<std::int64_t, kBleuOrders> matches{}, ngrams{};
  std::int64_t hypothesis_words = 0, reference_words = 0;

  // Adds a segment. There is at least one reference.
  void add(std::string_view hypothesis, const std::vector<std::string_view>& references,
           BleuTokenizer tokenizer);
  Bleu bleu() const;
};

// What the score depends on, in sacreBLEU's notation: sacreBLEU prints the same signature except
// for the version.
std::string bleu_signature(int num_references, BleuTokenizer tokenizer);

// A line in sacreBLEU's format: signature, score, precisions and lengths.
std::string bleu_line(const BleuCounts& counts, int num_references, BleuTokenizer tokenizer);

}  // namespace birkhoff
