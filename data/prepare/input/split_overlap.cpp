#include "data/prepare/input/split_overlap.h"

#include <fmt/format.h>

#include <utility>

#include "cluster/base/files/checksum.h"
#include "cluster/base/text/plural.h"

namespace birkhoff {
namespace {

// A split that evaluation measures, and one that should not contain its texts.
constexpr std::array<std::pair<SplitIndex, SplitIndex>, 3> kSplitPairs = {
    {{kValid, kTrain}, {kTest, kTrain}, {kTest, kValid}}};

}  // namespace

void SplitOverlap::add(std::string_view text) {
  // Equal texts come in equal parts.
  const std::uint64_t chain[] = {hash_, xxh3_64(text.data(), text.size())};
  hash_ = xxh3_64(chain, sizeof(chain));
}

void SplitOverlap::end_document(SplitIndex split, const Document& document) {
  const std::uint64_t hash = std::exchange(hash_, 0);
  ++documents_[split];
  if (hash % sampled_ != 0) return;
  Copies& copies = texts_[hash];
  ++copies[split];
  for (std::size_t pair = 0; pair < kSplitPairs.size(); ++pair) {
    const auto& [held_out, other] = kSplitPairs[pair];
    if (split != held_out && split != other) continue;
    const bool is_shared = copies[held_out] > 0 && copies[other] > 0;
    if (is_shared && first_[pair].empty()) first_[pair] = document.shown_path;
  }
  while (texts_.size() > kMaxTexts) {
    sampled_ *= 2;
    std::erase_if(texts_, [&](const auto& text) { return text.first % sampled_ != 0; });
  }
}

std::vector<std::string> SplitOverlap::notes() const {
  std::vector<std::string> lines;
  for (std::size_t pair = 0; pair < kSplitPairs.size(); ++pair) {
    const auto& [held_out, other] = kSplitPairs[pair];
    std::int64_t shared = 0;
    for (const auto& [hash, copies] : texts_) {
      if (copies[other] > 0) shared += copies[held_out];
    }
    if (shared == 0) continue;
    lines.push_back(fmt::format(
        "warning: {}{} of the {} of {} have the same text as documents of {}{} (the first: {})",
        sampled_ == 1 ? "" : "about ", shared * static_cast<std::int64_t>(sampled_),
        counted(documents_[held_out], "document"), kSplitNames[held_out], kSplitNames[other],
        sampled_ == 1 ? "" : fmt::format(", by a sample of 1 in {} texts", sampled_),
        first_[pair]));
  }
  return lines;
}

}  // namespace birkhoff
