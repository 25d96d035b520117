// Sentences with the statistics of LM1B (Chelba et al. 2013, arXiv:1312.3005), for corpora that
// measure: the counts of its sentences and of its vocabulary, 25.4 words a sentence (a negative
// binomial distribution, standard deviation 13), words by Zipf's law, p(rank) ~ 1 / (rank + 2.7).
// Sentence i of a seed is a function of both numbers (Philox).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace birkhoff {

class GeneratedText {
 public:
  static constexpr std::int64_t kTrain = 30'301'028, kValid = 306'688;
  // The published vocabulary of 793,471 ids has an unknown id and an end mark.
  static constexpr std::int64_t kWords = 793'469, kUnknownId = kWords, kEndOfSentence = kWords + 1;

  explicit GeneratedText(std::uint64_t seed);

  // The number of words of a sentence, at least 1.
  std::int64_t length(std::int64_t number) const;
  // Appends the ids of its words and the end mark. Ids are ranks: 0 is the most frequent word.
  void append_sentence(std::int64_t number, std::vector<std::int32_t>& ids) const;

  // The word of an id: syllables, fewer for frequent words.
  static std::string word(std::int64_t id);
  static std::int64_t word_bytes(std::int64_t id);
  // The vocabulary file of the tokenizer `whitespace`.
  static std::string vocabulary_file();

 private:
  std::uint64_t seed_;
  std::vector<std::uint32_t> gap_limits_;  // P(gap > k) in units of 2^-32
  // Walker's alias method: a slot yields its own id with probability limit / 2^32, else the other.
  struct Slot {
    std::uint32_t limit, other;
  };
  std::vector<Slot> slots_;
};

}  // namespace birkhoff
