// The ids of words that were encoded before. Most words of a text are frequent ones.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "cluster/base/files/checksum.h"

namespace birkhoff {

// A word has one slot, of a cache line, which it takes from another word. So a look-up costs at
// most one miss of the processor's cache, and memory is 8 MiB.
class WordCache {
 public:
  // Empty if the word is not known.
  std::span<const std::int32_t> find(std::string_view word) const {
    if (slots_.empty() || word.size() > kMaxBytes) return {};
    const Slot& slot = slots_[slot_of(word)];
    if (std::string_view(slot.word.data(), slot.bytes) != word) return {};
    return std::span(slot.ids).first(slot.count);
  }

  // Does nothing if the word or its list of ids is long.
  void add(std::string_view word, std::span<const std::int32_t> ids) {
    if (word.size() > kMaxBytes || ids.size() > kMaxIds) return;
    if (slots_.empty()) slots_.resize(kSlots);
    Slot& slot = slots_[slot_of(word)];
    std::ranges::copy(word, slot.word.begin());
    std::ranges::copy(ids, slot.ids.begin());
    slot.bytes = static_cast<std::uint8_t>(word.size());
    slot.count = static_cast<std::uint8_t>(ids.size());
  }

 private:
  static constexpr std::size_t kSlots = 1 << 17, kMaxBytes = 26, kMaxIds = 9;
  struct alignas(64) Slot {
    std::array<char, kMaxBytes> word = {};
    std::uint8_t bytes = 0, count = 0;
    std::array<std::int32_t, kMaxIds> ids = {};
  };
  static_assert(sizeof(Slot) == 64);

  static std::size_t slot_of(std::string_view word) {
    return xxh3_64(word.data(), word.size()) % kSlots;
  }

  std::vector<Slot> slots_;  // none until the first word
};

}  // namespace birkhoff
