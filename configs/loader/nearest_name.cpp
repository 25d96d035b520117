#include <algorithm>
#include <array>
#include <cctype>
#include <utility>
#include <vector>

#include "configs/loader/config_io.h"

namespace birkhoff {
namespace {

// The number of insertions, deletions, substitutions and swaps of neighbors that turn a into b,
// ignoring case (optimal string alignment).
std::size_t edit_distance(const std::string& a, const std::string& b) {
  const auto lower = [](char c) { return std::tolower(static_cast<unsigned char>(c)); };
  std::vector<std::size_t> before, previous, row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    before = std::move(previous);
    previous = row;
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const bool same = lower(a[i - 1]) == lower(b[j - 1]);
      row[j] = std::min({previous[j] + 1, row[j - 1] + 1, previous[j - 1] + (same ? 0 : 1)});
      if (i > 1 && j > 1 && lower(a[i - 1]) == lower(b[j - 2]) &&
          lower(a[i - 2]) == lower(b[j - 1])) {
        row[j] = std::min(row[j], before[j - 2] + 1);
      }
    }
  }
  return row[b.size()];
}

// Other programs' names for our values.
constexpr std::array<std::pair<const char*, const char*>, 7> kOtherWords = {{{"gpu", "cuda"},
                                                                             {"half", "fp16"},
                                                                             {"float16", "fp16"},
                                                                             {"bfloat16", "bf16"},
                                                                             {"float32", "fp32"},
                                                                             {"float64", "fp64"},
                                                                             {"double", "fp64"}}};

}  // namespace

std::string nearest_name(const std::string& name, const std::vector<std::string>& candidates) {
  // Up to a third of the name may be wrong; more is a different word. Long names are not typing
  // errors.
  constexpr std::size_t kLongestName = 64;
  if (name.empty() || name.size() > kLongestName) return "";
  for (const auto& [word, ours] : kOtherWords) {
    const bool is_there = std::find(candidates.begin(), candidates.end(), ours) != candidates.end();
    if (is_there && edit_distance(name, word) == 0) return ours;
  }
  std::string nearest;
  std::size_t best = std::max<std::size_t>(1, name.size() / 3) + 1;
  for (const std::string& candidate : candidates) {
    const std::size_t distance = edit_distance(name, candidate);
    if (distance < best && distance < candidate.size()) {
      best = distance;
      nearest = candidate;
    }
  }
  return nearest;
}

}  // namespace birkhoff
