#include "data/prepare/classes.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "cluster/base/error.h"
#include "configs/loader/message_text.h"
#include "data/corpus/manifest.h"

namespace birkhoff {
namespace {

// So that the manifest, which lists the labels once for each split, stays far below its own limit.
constexpr std::int64_t kMaxLabelBytes = 2 << 20;

// Whether the text is an integer of at most 18 digits in its usual form: no plus, no extra zeros.
bool is_plain_integer(std::string_view text) {
  if (text == "0") return true;
  if (text.starts_with('-')) text.remove_prefix(1);
  return !text.empty() && text.size() <= 18 && text[0] != '0' &&
         text.find_first_not_of("0123456789") == std::string_view::npos;
}

}  // namespace

Classes::Classes(std::vector<std::string> names, const char* item, const char* doubt)
    : known_(!names.empty()), item_(item), doubt_(doubt), names_(std::move(names)) {
  for (const std::string& name : names_)
    values_.emplace(name, static_cast<std::int64_t>(values_.size()));
}

void Classes::add(const Document& row) {
  if (values_.find(row.label) != values_.end()) return;
  if (known_) {
    fail(ExitCode::kData,
         "{}: the label {} is none of the {} classes of --like: {}; rename it, or prepare without "
         "--like",
         row.shown_path, quoted(std::string(row.label)), names_.size(),
         printable(fmt::format("{}", fmt::join(names_, ", "))));
  }
  values_.emplace(row.label, 0);
  if (values_.size() > kMaxClasses) {
    fail(ExitCode::kData, "{}: {} is different label number {} (at most {}); {}", row.shown_path,
         quoted(std::string(row.label)), values_.size(), kMaxClasses, doubt_);
  }
  bytes_ += static_cast<std::int64_t>(row.label.size());
  if (bytes_ > kMaxLabelBytes) {
    fail(ExitCode::kData, "{}: up to here, {} different labels have {} bytes (at most {}); {}",
         row.shown_path, values_.size(), bytes_, kMaxLabelBytes, doubt_);
  }
}

void Classes::finish(const std::string& path) {
  if (known_) return;
  for (const auto& entry : values_) names_.push_back(entry.first);
  if (names_.size() < 2) {
    fail(ExitCode::kData, "{}: every {} has the label {}; there must be at least two: {}", path,
         item_, birkhoff::quoted(names_.front()), doubt_);
  }
  if (std::all_of(names_.begin(), names_.end(), is_plain_integer)) {
    std::sort(names_.begin(), names_.end(), [](const std::string& a, const std::string& b) {
      return std::stoll(a) < std::stoll(b);
    });
  }
  for (std::size_t i = 0; i < names_.size(); ++i) values_[names_[i]] = static_cast<std::int64_t>(i);
}

std::int64_t Classes::value_of(const Document& row) const {
  const auto found = values_.find(row.label);
  if (found == values_.end()) {
    fail(ExitCode::kData,
         "{}: the label {} was not there before: the input changed while it was read; start the "
         "command again",
         row.shown_path, quoted(std::string(row.label)));
  }
  return found->second;
}

}  // namespace birkhoff
