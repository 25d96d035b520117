#include "data/tokenizers/text_decoder.h"

#include <algorithm>

#include "cluster/base/text/utf8.h"

namespace birkhoff {

TextDecoder::TextDecoder(const Tokenizer& tokenizer, const std::vector<std::int32_t>& before)
    : tokenizer_(tokenizer) {
  if (!before.empty()) last_ = {before.back()};
}

std::string TextDecoder::add(std::int32_t id) {
  pending_.push_back(id);
  return take(pending_.size() - num_unfinished());
}

std::string TextDecoder::finish() { return take(pending_.size()); }

// The number of ids at the end that are the first bytes of an incomplete character.
std::size_t TextDecoder::num_unfinished() const {
  constexpr std::size_t kMaxBytes = 4;  // of a character
  std::string bytes;
  for (auto id = pending_.rbegin(); id != pending_.rend() && bytes.size() < kMaxBytes; ++id) {
    const std::optional<char> byte = tokenizer_.byte_of(*id);
    if (!byte) break;
    bytes.insert(bytes.begin(), *byte);
  }
  return bytes.size() - complete_utf8(bytes);
}

std::string TextDecoder::take(std::size_t num_ids) {
  if (num_ids == 0) return "";
  std::vector<std::int32_t> ids = last_;
  ids.insert(ids.end(), pending_.begin(), pending_.begin() + static_cast<std::ptrdiff_t>(num_ids));
  const std::string before = tokenizer_.decode(last_), text = tokenizer_.decode(ids);
  last_ = {ids.back()};
  pending_.erase(pending_.begin(), pending_.begin() + static_cast<std::ptrdiff_t>(num_ids));
  return text.substr(std::min(before.size(), text.size()));
}

}  // namespace birkhoff
