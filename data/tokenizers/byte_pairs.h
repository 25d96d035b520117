// Byte pair encoding of the words of a text, with the ids of the SentencePiece library for the
// whole text, which is many times slower.
//
// The encoding begins with characters, and merges the two neighboring symbols whose concatenation
// is the piece with the highest score, until no two are a piece (Sennrich et al. 2016, section 3.2;
// the leftmost of equal ones first, as SentencePiece 0.1.97 does). No merge crosses a boundary that
// no piece crosses, and merges on its two sides do not depend on each other. So if no piece has a
// space after another character, the words of a text, each with the spaces before it, can be
// encoded one by one. The unigram model has no such boundaries: its scores are sums over the whole
// text, whose rounding may decide.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace birkhoff {

class BytePairs {
 public:
  // SentencePiece's sign for a space. A text that has this character itself cannot be cut.
  static constexpr std::string_view kSpace = "\u2581";
  // Longer words are left to the library, whose time does not grow with the square of the length.
  static constexpr std::size_t kMaxWordBytes = 48;

  // model: an undamaged one. nullopt: its texts cannot be cut, because it does not merge byte
  // pairs, normalizes text in other ways than by adds_space(), or has a piece with a space after
  // another character.
  static std::optional<BytePairs> of(const std::string& model);

  // Whether the model puts a space in front of each text.
  bool adds_space() const { return adds_space_; }
  // The number of bytes of the word at the start of a non-empty text: it has spaces only at its
  // start, and at the end of the text. If the model allows it, a line feed is a word.
  std::size_t word_length(std::string_view text) const;
  // Appends the ids of a text of at most kMaxWordBytes that is one word. Returns false, and appends
  // nothing, if that takes the library: the word has unknown characters, or the model has pieces
  // that users have defined.
  bool encode(std::string_view word, std::vector<std::int32_t>& ids) const;

 private:
  // Two neighboring symbols that can be merged. Symbols are the ids of pieces, and after them those
  // of characters that are only parts of pieces; -1 is any other character.
  struct Pair {
    std::int32_t left = -1, right = -1, merged = -1;
    float score = 0;
  };
  void set_pairs(const std::vector<std::pair<std::string, float>>& pieces);
  std::size_t slot_of(std::int32_t left, std::int32_t right) const;
  const Pair* find_pair(std::int32_t left, std::int32_t right) const;
  std::int32_t symbol_of(std::string_view character) const;

  bool adds_space_ = false, cuts_at_lines_ = false;
  bool all_normal_ = true;                    // no pieces that users have defined or disabled
  std::int32_t num_pieces_ = 0, space_ = -1;  // the symbol kSpace
  std::unordered_map<std::string, std::int32_t> symbols_;  // by text
  std::array<std::int32_t, 128> ascii_;                    // symbols of these characters
  std::vector<Pair> pairs_;                                // a hash table with open addressing
  std::array<std::int32_t, 256> bytes_;  // ids of single bytes; -1: there are none
};

}  // namespace birkhoff
