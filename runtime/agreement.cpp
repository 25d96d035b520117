#include "runtime/agreement.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <iterator>
#include <span>

#include "cluster/base/files/checksum.h"

namespace birkhoff {
namespace {

at::Tensor int64_tensor(std::int64_t elements) {
  return at::empty({elements}, at::TensorOptions(at::kLong));
}

// The ranks that hold what rank r holds, for the rank r with the most such ranks (the lowest of
// equals).
std::vector<int> largest_party(std::span<const std::int64_t> hashes, int num_ranks) {
  const std::size_t length = hashes.size() / static_cast<std::size_t>(num_ranks);
  const auto of = [&](int rank) {
    return hashes.subspan(static_cast<std::size_t>(rank) * length, length);
  };
  std::vector<int> largest;
  for (int r = 0; r < num_ranks; ++r) {
    std::vector<int> party;
    for (int other = 0; other < num_ranks; ++other) {
      if (std::ranges::equal(of(r), of(other))) party.push_back(other);
    }
    if (party.size() > largest.size()) largest = party;
  }
  return largest;
}

// How the bits of `mine` differ from those of `theirs`; empty if they do not.
std::string describe_elements(const at::Tensor& mine, const at::Tensor& theirs) {
  const auto* a = static_cast<const char*>(mine.const_data_ptr());
  const auto* b = static_cast<const char*>(theirs.const_data_ptr());
  const auto size = static_cast<std::size_t>(mine.element_size());
  std::int64_t first = -1, count = 0;
  for (std::int64_t i = 0; i < mine.numel(); ++i) {
    const std::size_t at = static_cast<std::size_t>(i) * size;
    if (std::memcmp(a + at, b + at, size) == 0) continue;
    if (first < 0) first = i;
    ++count;
  }
  if (count == 0) return "";
  return fmt::format("{} of {} elements, element {} is {:.9g} instead of {:.9g}", count,
                     mine.numel(), first, mine[first].item<double>(), theirs[first].item<double>());
}

}  // namespace

Agreement::Agreement(ProcessGroup& world, ProcessGroup& replicas,
                     const std::vector<TensorPart>& parts, std::string host, ProcessGroup* copies,
                     ProcessGroup* tensor)
    : world_(world), host_(std::move(host)) {
  // The ranks of each group are equidistant in the world (cluster/mesh.h).
  const auto add = [&](ProcessGroup& ranks, int stride, const auto& belongs) {
    Comparison comparison{ranks, {}, {}};
    std::ranges::copy_if(parts, std::back_inserter(comparison.parts), belongs);
    const int first = world.rank() - ranks.rank() * stride;
    for (int i = 0; i < ranks.size(); ++i) comparison.world_ranks.push_back(first + i * stride);
    comparisons_.push_back(std::move(comparison));
  };
  const int parts_of_model = world.size() / replicas.size();
  add(world, 1,
      [](const TensorPart& part) { return part.replicated && part.region.has_whole_box(); });
  if (parts_of_model > 1) {
    add(replicas, parts_of_model,
        [](const TensorPart& part) { return part.replicated && !part.region.has_whole_box(); });
  }
  if (copies != nullptr) {
    // Each rank carries a past of its own.
    add(*copies, world.size() / copies->size(),
        [](const TensorPart& part) { return !part.replicated && part.kind != StateKind::kPast; });
  }
  if (tensor != nullptr && tensor->size() > 1) {
    add(*tensor, 1,
        [](const TensorPart& part) { return !part.replicated && part.region.has_whole_box(); });
  }
}

std::string Agreement::find_difference(const TrainState& state) {
  std::string difference = find_difference(comparisons_[0], text_of(state));
  for (std::size_t i = 1; i < comparisons_.size() && difference.empty(); ++i) {
    // The other ranks of the world have other parts.
    for (std::string& of_rank :
         world_.all_gather_bytes(find_difference(comparisons_[i], ""), "difference of parts")) {
      if (difference.empty()) difference = std::move(of_rank);
    }
  }
  return difference;
}

std::string Agreement::find_difference(const Comparison& comparison,
                                       const std::string& position) const {
  ProcessGroup& ranks = comparison.ranks;
  if (ranks.size() == 1) return "";
  // One hash per part, then one of the position.
  const at::Tensor hashes = int64_tensor(static_cast<std::int64_t>(comparison.parts.size()) + 1);
  std::int64_t* hash = hashes.mutable_data_ptr<std::int64_t>();
  for (const TensorPart& part : comparison.parts) {
    const at::Tensor data = part.data.cpu();
    *hash++ = std::bit_cast<std::int64_t>(xxh3_64(data.const_data_ptr(), data.nbytes()));
  }
  *hash = std::bit_cast<std::int64_t>(xxh3_64(position.data(), position.size()));

  const at::Tensor digest = int64_tensor(1), digests = int64_tensor(ranks.size());
  *digest.mutable_data_ptr<std::int64_t>() =
      std::bit_cast<std::int64_t>(xxh3_64(hashes.const_data_ptr(), hashes.nbytes()));
  ranks.all_gather(digests, digest, "agreement");
  const std::int64_t* all = digests.const_data_ptr<std::int64_t>();
  if (std::all_of(all, all + ranks.size(), [&](std::int64_t d) { return d == all[0]; })) return "";
  return describe(comparison, hashes, position);
}

std::string Agreement::describe(const Comparison& comparison, const at::Tensor& hashes,
                                const std::string& position) const {
  ProcessGroup& ranks = comparison.ranks;
  const std::int64_t length = hashes.numel();
  const at::Tensor gathered = int64_tensor(length * ranks.size());
  ranks.all_gather(gathered, hashes, "hashes of all tensors");
  const std::int64_t* all = gathered.const_data_ptr<std::int64_t>();
  const std::vector<int> party =
      largest_party({all, static_cast<std::size_t>(gathered.numel())}, ranks.size());
  const int reference = party.front();
  const bool majority = 2 * static_cast<int>(party.size()) > ranks.size();

  std::vector<int> others;
  std::vector<std::int64_t> differing;  // indices of hashes
  for (int rank = 0; rank < ranks.size(); ++rank) {
    if (std::ranges::find(party, rank) == party.end()) others.push_back(rank);
  }
  for (std::int64_t i = 0; i < length; ++i) {
    if (std::ranges::any_of(others, [&](int rank) {
          return all[rank * length + i] != all[reference * length + i];
        })) {
      differing.push_back(i);
    }
  }

  // Each rank gives an example of the first thing that differs.
  const std::int64_t first = differing.front();
  std::string what, mine;
  if (first < static_cast<std::int64_t>(comparison.parts.size())) {
    const TensorPart& part = comparison.parts[static_cast<std::size_t>(first)];
    what = part.name;
    const at::Tensor ours = part.data.cpu(), theirs = ours.clone();
    ranks.broadcast(theirs, reference, "tensor that differs");
    mine = describe_elements(ours, theirs);
  } else {
    what = "the position in the run";
    const std::string theirs = ranks.broadcast_bytes(position, reference, "position");
    if (position != theirs) mine = fmt::format("{} instead of {}", position, theirs);
  }
  const auto named = [&](std::vector<int> of_comparison) {
    for (int& rank : of_comparison) rank = comparison.world_ranks[static_cast<std::size_t>(rank)];
    return of_comparison;
  };
  if (!mine.empty()) mine = fmt::format("rank {} on {}: {}", world_.rank(), host_, mine);
  std::vector<std::string> examples = ranks.all_gather_bytes(mine, "how ranks differ");
  std::erase_if(examples, [](const std::string& text) { return text.empty(); });

  const std::string who =
      majority
          ? fmt::format("{} not match the other ranks",
                        others.size() == 1
                            ? fmt::format("rank {} does", named(others)[0])
                            : fmt::format("ranks {} do", fmt::join(named(others), ", ")))
          : fmt::format("ranks {} and {} hold different bits, and no majority says which are right",
                        fmt::join(named(party), ", "), fmt::join(named(others), ", "));
  const std::string more =
      differing.size() == 1 ? "" : fmt::format(" and {} more", differing.size() - 1);
  return fmt::format("{}: {}{} (compared with rank {}: {})", who, what, more, named({reference})[0],
                     fmt::join(examples, "; "));
}

}  // namespace birkhoff
