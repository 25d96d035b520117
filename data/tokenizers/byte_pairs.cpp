#include "data/tokenizers/byte_pairs.h"

#include <google/protobuf/unknown_field_set.h>

#include <algorithm>
#include <bit>

#include "cluster/base/text/utf8.h"

namespace birkhoff {
namespace {

using google::protobuf::UnknownField;
using google::protobuf::UnknownFieldSet;

// The numbers of the fields that are read, and values of enums, from sentencepiece_model.proto of
// SentencePiece 0.1.97.
enum ModelField { kPieces = 1, kTrainer = 2, kNormalizer = 3 };
enum PieceField { kText = 1, kScore = 2, kType = 3 };
enum TrainerField { kModelType = 3, kSpaceIsSuffix = 24 };
enum NormalizerField { kCharacterMap = 2, kAddsSpace = 3, kRemovesSpaces = 4, kMarksSpaces = 5 };
constexpr std::uint64_t kUnigram = 1, kBytePairs = 2;                           // model types
constexpr std::uint64_t kNormal = 1, kUserDefined = 4, kUnused = 5, kByte = 6;  // piece types

// The last field of this number, as Protobuf reads it; null if there is none.
const UnknownField* find_field(const UnknownFieldSet& message, int number,
                               UnknownField::Type type) {
  for (int i = message.field_count(); i-- > 0;) {
    const UnknownField& field = message.field(i);
    if (field.number() == number && field.type() == type) return &field;
  }
  return nullptr;
}

std::uint64_t number_in(const UnknownFieldSet& message, int field, std::uint64_t otherwise) {
  const UnknownField* found = find_field(message, field, UnknownField::TYPE_VARINT);
  return found == nullptr ? otherwise : found->varint();
}

float score_in(const UnknownFieldSet& piece) {
  const UnknownField* found = find_field(piece, kScore, UnknownField::TYPE_FIXED32);
  return found == nullptr ? 0 : std::bit_cast<float>(found->fixed32());
}

std::string text_in(const UnknownFieldSet& message, int field) {
  const UnknownField* found = find_field(message, field, UnknownField::TYPE_LENGTH_DELIMITED);
  return found == nullptr ? "" : found->length_delimited();
}

// Whether the piece crosses the boundary before a space.
bool has_inner_space(std::string_view piece) {
  while (piece.starts_with(BytePairs::kSpace)) piece.remove_prefix(BytePairs::kSpace.size());
  return piece.find(BytePairs::kSpace) != std::string_view::npos ||
         piece.find(' ') != std::string_view::npos;
}

}  // namespace

std::optional<BytePairs> BytePairs::of(const std::string& model) {
  UnknownFieldSet fields, trainer, normalizer;
  if (!fields.ParseFromString(model) || !trainer.ParseFromString(text_in(fields, kTrainer)) ||
      !normalizer.ParseFromString(text_in(fields, kNormalizer)))
    return std::nullopt;
  const bool only_marks_spaces =
      text_in(normalizer, kCharacterMap).empty() && number_in(normalizer, kRemovesSpaces, 1) == 0 &&
      number_in(normalizer, kMarksSpaces, 1) != 0 && number_in(trainer, kSpaceIsSuffix, 0) == 0;
  if (!only_marks_spaces || number_in(trainer, kModelType, kUnigram) != kBytePairs)
    return std::nullopt;
  BytePairs made;
  made.adds_space_ = number_in(normalizer, kAddsSpace, 1) != 0;
  made.bytes_.fill(-1);
  bool joins_line_feed = false;
  std::vector<std::pair<std::string, float>> pieces;  // by id; empty text: cannot be merged
  for (int i = 0; i < fields.field_count(); ++i) {
    if (fields.field(i).number() != kPieces) continue;
    UnknownFieldSet entry;
    if (!entry.ParseFromString(fields.field(i).length_delimited())) return std::nullopt;
    const std::string text = text_in(entry, kText);
    const std::uint64_t type = number_in(entry, kType, kNormal);
    if (has_inner_space(text)) return std::nullopt;
    joins_line_feed |= text.size() > 1 && text.find('\n') != std::string::npos;
    pieces.emplace_back(type == kNormal ? text : "", score_in(entry));
    made.all_normal_ &= type != kUserDefined && type != kUnused;
    if (type == kByte) {  // "<0xE4>", which the library has checked
      const int byte = std::stoi(text.substr(3, 2), nullptr, 16);
      made.bytes_[static_cast<std::size_t>(byte)] = static_cast<std::int32_t>(pieces.size()) - 1;
    }
  }
  made.set_pairs(pieces);
  // Unknown characters next to each other become one unknown token, unless they become bytes.
  const auto is_piece = [&](std::string_view character) {
    const std::int32_t symbol = made.symbol_of(character);
    return symbol >= 0 && symbol < made.num_pieces_;
  };
  if (!is_piece(kSpace)) return std::nullopt;
  made.space_ = made.symbol_of(kSpace);
  const bool knows_line_feed = made.bytes_['\n'] >= 0 || is_piece("\n");
  made.cuts_at_lines_ = !made.adds_space_ && knows_line_feed && !joins_line_feed;
  return made;
}

std::size_t BytePairs::word_length(std::string_view text) const {
  std::size_t end = 1;
  for (; end < text.size(); ++end) {
    const char before = text[end - 1], next = text[end];
    if (next == ' ' && before != ' ') break;
    if (cuts_at_lines_ && (next == '\n' || before == '\n')) break;
  }
  // A word that is nothing but a space would be an empty text for a model that adds one.
  return text.find_first_not_of(' ', end) == std::string_view::npos ? text.size() : end;
}

bool BytePairs::encode(std::string_view word, std::vector<std::int32_t>& ids) const {
  if (!all_normal_ || word.size() > kMaxWordBytes) return false;
  // The symbols, the position in the word after each, and the pairs that they begin.
  constexpr std::size_t kMaxSymbols = kMaxWordBytes + 1;
  std::array<std::int32_t, kMaxSymbols> symbols = {};
  std::array<std::size_t, kMaxSymbols> ends = {};
  std::array<const Pair*, kMaxSymbols> pairs = {};
  std::size_t count = 0;
  const auto add = [&](std::int32_t symbol, std::size_t end) {
    symbols[count] = symbol;
    ends[count++] = end;
  };
  if (adds_space_) add(space_, 0);
  for (std::size_t at = 0; at < word.size();) {
    const int bytes = utf8_at(word, at).bytes;
    if (bytes == 0) return false;  // the library replaces what is not UTF-8
    const std::string_view character = word.substr(at, static_cast<std::size_t>(bytes));
    at += character.size();
    add(character == " " ? space_ : symbol_of(character), at);
  }
  const auto find_pair_at = [&](std::size_t i) {
    pairs[i] = i + 1 < count ? find_pair(symbols[i], symbols[i + 1]) : nullptr;
  };
  for (std::size_t i = 0; i < count; ++i) find_pair_at(i);
  while (true) {
    const Pair* best = nullptr;
    std::size_t at = 0;
    for (std::size_t i = 0; i < count; ++i) {
      if (pairs[i] == nullptr || (best != nullptr && !(pairs[i]->score > best->score))) continue;
      best = pairs[i];
      at = i;
    }
    if (best == nullptr) break;
    const auto close_gap = [&](auto& values) {
      std::copy(values.begin() + at + 1, values.begin() + count, values.begin() + at);
    };
    close_gap(symbols);
    close_gap(ends);
    close_gap(pairs);
    --count;
    symbols[at] = best->merged;
    find_pair_at(at);
    if (at > 0) find_pair_at(at - 1);
  }
  const std::size_t before = ids.size();
  for (std::size_t i = 0; i < count; ++i) {
    if (symbols[i] >= 0 && symbols[i] < num_pieces_) {
      ids.push_back(symbols[i]);
      continue;
    }
    for (std::size_t at = i == 0 ? 0 : ends[i - 1]; at < ends[i]; ++at) {
      ids.push_back(bytes_[static_cast<unsigned char>(word[at])]);
      if (ids.back() >= 0) continue;
      ids.resize(before);
      return false;
    }
  }
  return true;
}

void BytePairs::set_pairs(const std::vector<std::pair<std::string, float>>& pieces) {
  num_pieces_ = static_cast<std::int32_t>(pieces.size());
  for (std::int32_t id = 0; id < num_pieces_; ++id) {
    const std::string& text = pieces[static_cast<std::size_t>(id)].first;
    if (!text.empty()) symbols_.emplace(text, id);
  }
  std::vector<Pair> pairs;
  for (std::int32_t id = 0; id < num_pieces_; ++id) {
    const auto& [text, score] = pieces[static_cast<std::size_t>(id)];
    for (std::size_t at = 0; at < text.size();) {
      const auto bytes = static_cast<std::size_t>(std::max(1, utf8_at(text, at).bytes));
      symbols_.emplace(text.substr(at, bytes), num_pieces_ + std::ssize(symbols_));
      at += bytes;
    }
  }
  for (std::int32_t id = 0; id < num_pieces_; ++id) {
    const auto& [text, score] = pieces[static_cast<std::size_t>(id)];
    // A longer one is no part of a word that encode() takes. A space takes three bytes in a piece.
    if (text.size() > 3 * (kMaxWordBytes + 1)) continue;
    for (std::size_t at = 1; at < text.size(); ++at) {
      const auto left = symbols_.find(text.substr(0, at)), right = symbols_.find(text.substr(at));
      if (left != symbols_.end() && right != symbols_.end())
        pairs.push_back({left->second, right->second, id, score});
    }
  }
  pairs_.resize(std::bit_ceil(2 * pairs.size() + 1));
  for (const Pair& pair : pairs) {
    std::size_t slot = slot_of(pair.left, pair.right);
    while (pairs_[slot].merged >= 0) slot = (slot + 1) % pairs_.size();
    pairs_[slot] = pair;
  }
  for (std::size_t c = 0; c < ascii_.size(); ++c) {
    const auto found = symbols_.find(std::string(1, static_cast<char>(c)));
    ascii_[c] = found == symbols_.end() ? -1 : found->second;
  }
}

std::size_t BytePairs::slot_of(std::int32_t left, std::int32_t right) const {
  // Multiplicative hashing (Knuth, The Art of Computer Programming, vol. 3, section 6.4).
  const auto key = static_cast<std::uint64_t>(left) << 32 | static_cast<std::uint32_t>(right);
  return (key * 0x9e3779b97f4a7c15) >> 32 & (pairs_.size() - 1);
}

const BytePairs::Pair* BytePairs::find_pair(std::int32_t left, std::int32_t right) const {
  for (std::size_t slot = slot_of(left, right);; slot = (slot + 1) % pairs_.size()) {
    const Pair& pair = pairs_[slot];
    if (pair.merged < 0) return nullptr;
    if (pair.left == left && pair.right == right) return &pair;
  }
}

std::int32_t BytePairs::symbol_of(std::string_view character) const {
  if (character.size() == 1) return ascii_[static_cast<unsigned char>(character[0])];
  const auto found = symbols_.find(std::string(character));
  return found == symbols_.end() ? -1 : found->second;
}

}  // namespace birkhoff
