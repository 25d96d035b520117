#include "data/scores/bleu.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <unordered_map>

#include "cluster/base/error.h"

namespace birkhoff {
namespace {

using NgramCounts = std::unordered_map<std::string, std::int64_t>;

// Words have no white space, so n-grams joined by spaces are equal only if all their words are.
NgramCounts count_ngrams(const std::vector<std::string>& words, int order) {
  NgramCounts counts;
  const auto n = static_cast<std::size_t>(order);
  for (std::size_t end = n; end <= words.size(); ++end) {
    std::string ngram = words[end - n];
    for (std::size_t i = end - n + 1; i < end; ++i) (ngram += ' ') += words[i];
    ++counts[ngram];
  }
  return counts;
}

}  // namespace

void BleuCounts::add(std::string_view hypothesis, const std::vector<std::string_view>& references,
                     BleuTokenizer tokenizer) {
  require(!references.empty(), "BleuCounts: no reference");
  const std::vector<std::string> words = bleu_words(hypothesis, tokenizer);
  std::vector<std::vector<std::string>> reference_texts;
  for (const std::string_view reference : references)
    reference_texts.push_back(bleu_words(reference, tokenizer));

  const std::int64_t length = std::ssize(words);
  const auto closest = std::min_element(
      reference_texts.begin(), reference_texts.end(), [&](const auto& a, const auto& b) {
        const std::int64_t from_a = std::abs(std::ssize(a) - length),
                           from_b = std::abs(std::ssize(b) - length);
        return from_a != from_b ? from_a < from_b : a.size() < b.size();
      });
  hypothesis_words += length;
  reference_words += std::ssize(*closest);
  for (int order = 1; order <= kBleuOrders; ++order) {
    NgramCounts most;  // in a single reference
    for (const std::vector<std::string>& reference : reference_texts) {
      for (const auto& [ngram, count] : count_ngrams(reference, order)) {
        std::int64_t& so_far = most[ngram];
        so_far = std::max(so_far, count);
      }
    }
    const auto n = static_cast<std::size_t>(order - 1);
    ngrams[n] += std::max<std::int64_t>(0, length - order + 1);
    for (const auto& [ngram, count] : count_ngrams(words, order)) {
      if (const auto found = most.find(ngram); found != most.end())
        matches[n] += std::min(count, found->second);
    }
  }
}

Bleu BleuCounts::bleu() const {
  Bleu result;
  const auto hypothesis = static_cast<double>(hypothesis_words),
             reference = static_cast<double>(reference_words);
  if (hypothesis_words >= reference_words) {
    result.brevity_penalty = 1;
  } else if (hypothesis_words > 0) {
    result.brevity_penalty = std::exp(1 - reference / hypothesis);
  }
  // An order without matches has none in the higher orders either, so p_1 decides.
  if (matches[0] == 0) return result;
  double smoothing = 1, sum_of_logs = 0;
  bool has_all_orders = true;
  for (std::size_t n = 0; n < kBleuOrders; ++n) {
    if (ngrams[n] == 0) {
      has_all_orders = false;
      break;
    }
    const auto total = static_cast<double>(ngrams[n]);
    if (matches[n] == 0) {
      smoothing *= 2;
      result.precisions[n] = 100 / (smoothing * total);
    } else {
      result.precisions[n] = 100 * static_cast<double>(matches[n]) / total;
    }
    sum_of_logs += std::log(result.precisions[n]);
  }
  if (has_all_orders) result.score = result.brevity_penalty * std::exp(sum_of_logs / kBleuOrders);
  return result;
}

std::string bleu_signature(int num_references, BleuTokenizer tokenizer) {
  return fmt::format("nrefs:{}|case:mixed|eff:no|tok:{}|smooth:exp|version:birkhoff",
                     num_references, bleu_tokenizer_name(tokenizer));
}

std::string bleu_line(const BleuCounts& counts, int num_references, BleuTokenizer tokenizer) {
  const Bleu bleu = counts.bleu();
  const double ratio = counts.reference_words == 0
                           ? 0
                           : static_cast<double>(counts.hypothesis_words) /
                                 static_cast<double>(counts.reference_words);
  return fmt::format(
      "BLEU|{} = {:.2f} {:.1f}/{:.1f}/{:.1f}/{:.1f} (BP = {:.3f} ratio = {:.3f} hyp_len = {} "
      "ref_len = {})",
      bleu_signature(num_references, tokenizer), bleu.score, bleu.precisions[0], bleu.precisions[1],
      bleu.precisions[2], bleu.precisions[3], bleu.brevity_penalty, ratio, counts.hypothesis_words,
      counts.reference_words);
}

}  // namespace birkhoff
