#include "data/generate/generated_text.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "cluster/base/random/philox.h"

namespace birkhoff {
namespace {

// A sentence's words but the first are the sum of four gaps, geometrically distributed with this
// mean.
constexpr double kMeanGap = 24.4 / 4;
// Counters of a sentence's blocks of random bits.
constexpr std::uint64_t kLengthBlock = 0, kWordBlocks = 1;

constexpr std::string_view kConsonants = "btnskdlrmpgvfhz", kVowels = "aeiou";
constexpr auto kSyllables = static_cast<std::int64_t>(kConsonants.size() * kVowels.size());

// The number of syllables, and the rank among the words that have as many.
std::pair<int, std::int64_t> syllables_of(std::int64_t id) {
  int count = 1;
  for (std::int64_t words = kSyllables; id >= words; words *= kSyllables) {
    id -= words;
    ++count;
  }
  return {count, id};
}

}  // namespace

// Only sums, products and quotients of doubles: the same tables on every machine.
GeneratedText::GeneratedText(std::uint64_t seed) : seed_(seed) {
  constexpr double kUnit = 4294967296.0;
  for (double more = kMeanGap / (1 + kMeanGap), limit = more; limit * kUnit >= 1; limit *= more)
    gap_limits_.push_back(static_cast<std::uint32_t>(limit * kUnit));

  std::vector<double> shares(kWords);
  double sum = 0;
  for (std::int64_t id = 0; id < kWords; ++id)
    sum += shares[static_cast<std::size_t>(id)] = 1 / (static_cast<double>(id) + 3.7);
  std::vector<std::uint32_t> low, high;  // ids with less and with more than an equal share
  for (std::size_t id = 0; id < shares.size(); ++id) {
    shares[id] *= static_cast<double>(kWords) / sum;
    (shares[id] < 1 ? low : high).push_back(static_cast<std::uint32_t>(id));
  }
  slots_.resize(shares.size());
  while (!low.empty() && !high.empty()) {
    const std::uint32_t id = low.back(), rich = high.back();
    low.pop_back();
    slots_[id] = {static_cast<std::uint32_t>(shares[id] * kUnit), rich};
    shares[rich] -= 1 - shares[id];
    if (shares[rich] >= 1) continue;
    high.pop_back();
    low.push_back(rich);
  }
  for (const auto* rest : {&low, &high}) {  // equal shares but for rounding
    for (const std::uint32_t id : *rest) slots_[id] = {~std::uint32_t{0}, id};
  }
}

std::int64_t GeneratedText::length(std::int64_t number) const {
  std::int64_t length = 1;
  for (const std::uint32_t bits : philox(seed_, static_cast<std::uint64_t>(number), kLengthBlock)) {
    length +=
        std::ranges::lower_bound(gap_limits_, bits, std::ranges::greater()) - gap_limits_.begin();
  }
  return length;
}

void GeneratedText::append_sentence(std::int64_t number, std::vector<std::int32_t>& ids) const {
  std::array<std::uint32_t, 4> bits = {};
  const std::int64_t words = length(number);
  for (std::int64_t i = 0; i < words; ++i) {
    if (i % 4 == 0) {
      bits = philox(seed_, static_cast<std::uint64_t>(number),
                    kWordBlocks + static_cast<std::uint64_t>(i / 4));
    }
    // The high half of the product is a slot, the low half a fraction.
    const std::uint64_t product = std::uint64_t{bits[static_cast<std::size_t>(i % 4)]} * kWords;
    const auto slot = static_cast<std::uint32_t>(product >> 32);
    const bool own = static_cast<std::uint32_t>(product) <= slots_[slot].limit;
    ids.push_back(static_cast<std::int32_t>(own ? slot : slots_[slot].other));
  }
  ids.push_back(static_cast<std::int32_t>(kEndOfSentence));
}

std::string GeneratedText::word(std::int64_t id) {
  auto [count, rank] = syllables_of(id);
  std::string word;
  for (; count > 0; --count, rank /= kSyllables) {
    word += kConsonants[static_cast<std::size_t>(rank % kSyllables) % kConsonants.size()];
    word += kVowels[static_cast<std::size_t>(rank % kSyllables) / kConsonants.size()];
  }
  return word;
}

std::int64_t GeneratedText::word_bytes(std::int64_t id) { return 2 * syllables_of(id).first; }

std::string GeneratedText::vocabulary_file() {
  std::string content = "birkhoff whitespace 1\nunknown yes\n";
  for (std::int64_t id = 0; id < kWords; ++id) content += word(id) + "\n";
  return content;
}

}  // namespace birkhoff
