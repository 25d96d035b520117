// Corpora of pairs of symbol sequences: the algorithmic tasks of Tensor2Tensor
// (tensor2tensor/data_generators/algorithmic.py). Lengths are uniform in 1, 2, ..., max, and
// symbols are independent and uniform, with replacement. In train, max is train_length; in valid
// and test it is `length`. Sample i of a split is a function of the seed (Philox).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace birkhoff {

struct GeneratedPairs {
  // The targets: the source itself, its symbols in reverse order, or its symbols sorted.
  static const std::vector<std::string>& tasks();  // copy, reverse, sort

  // As in Tensor2Tensor. The text of symbol s is the number s, and its id is s + 2.
  static constexpr std::int64_t kPaddingId = 0, kEndId = 1, kFirstSymbolId = 2;
  static constexpr std::int64_t kMaxSymbols = 1 << 16, kMaxLength = 1 << 20;

  std::string task;
  std::int64_t symbols = 128;
  std::int64_t train_length = 64, length = 128;  // maximum numbers of symbols, without end marks
  std::int64_t samples = 100'000;                // of train
  std::int64_t test_samples = 10'000;            // of valid, and of test
  std::uint64_t seed = 1;

  // The ids of a source, with its end mark. split: 0, 1, 2 for train, valid, test.
  std::vector<std::int32_t> source(int split, std::int64_t number) const;
  // The ids of its target.
  std::vector<std::int32_t> target(const std::vector<std::int32_t>& source) const;
};

// Makes the corpus `out`, as birkhoff prepare makes one of pairs, with a shared tokenizer
// (whitespace). Returns false if the folder already held it. Errors as prepare_corpus().
bool generate_pairs(const std::string& out, const GeneratedPairs& pairs);

}  // namespace birkhoff
