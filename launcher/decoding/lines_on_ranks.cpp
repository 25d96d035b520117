#include "launcher/decoding/lines_on_ranks.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <numeric>
#include <optional>
#include <string_view>

#include "cluster/base/error.h"
#include "launcher/commands/text_input.h"

namespace birkhoff {
namespace {

constexpr std::size_t kLinesPerRound = 4096;

// Texts of any bytes as one: each after its length.
std::string packed(const std::vector<std::string>& texts) {
  std::string bytes;
  for (const std::string& text : texts) {
    const std::uint64_t length = text.size();
    bytes.append(reinterpret_cast<const char*>(&length), sizeof length);
    bytes += text;
  }
  return bytes;
}

std::vector<std::string> unpacked(std::string_view bytes) {
  std::vector<std::string> texts;
  while (!bytes.empty()) {
    std::uint64_t length = 0;
    std::memcpy(&length, bytes.data(), sizeof length);
    texts.emplace_back(bytes.substr(sizeof length, length));
    bytes.remove_prefix(sizeof length + length);
  }
  return texts;
}

}  // namespace

Batches batches_by_length(const std::vector<std::int64_t>& lengths, std::int64_t max_items,
                          std::int64_t max_elements, bool equal_lengths) {
  std::vector<std::size_t> order(lengths.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return lengths[a] > lengths[b]; });
  Batches batches;
  for (const std::size_t item : order) {
    const bool fits =
        !batches.empty() && std::ssize(batches.back()) < max_items &&
        (std::ssize(batches.back()) + 1) * lengths[batches.back().front()] <= max_elements &&
        (!equal_lengths || lengths[batches.back().front()] == lengths[item]);
    if (!fits) batches.emplace_back();
    batches.back().push_back(item);
  }
  return batches;
}

std::vector<std::string> compute_on_ranks(
    ProcessGroup& replicas, const Batches& batches,
    const std::function<std::vector<std::string>(const std::vector<std::size_t>&)>& compute,
    const std::function<void(std::int64_t)>& done) {
  const auto rank = static_cast<std::size_t>(replicas.rank()),
             ranks = static_cast<std::size_t>(replicas.size());
  std::vector<std::string> mine;
  for (std::size_t b = rank; b < batches.size(); b += ranks) {
    std::vector<std::string> of_batch = compute(batches[b]);
    require(of_batch.size() == batches[b].size(), "compute_on_ranks: results of a batch");
    std::move(of_batch.begin(), of_batch.end(), std::back_inserter(mine));
    done(std::ssize(mine));
  }
  std::size_t num_items = 0;
  for (const auto& batch : batches) num_items += batch.size();
  std::vector<std::string> results(num_items);
  const std::vector<std::string> of_ranks =
      replicas.all_gather_bytes(packed(mine), "results of lines");
  for (std::size_t r = 0; r < ranks; ++r) {
    std::vector<std::string> texts = unpacked(of_ranks[r]);
    auto text = texts.begin();
    for (std::size_t b = r; b < batches.size(); b += ranks) {
      for (const std::size_t item : batches[b]) results[item] = std::move(*text++);
    }
  }
  return results;
}

void check_on_rank_0_first(ProcessGroup& world, const std::function<void()>& check) {
  if (world.rank() == 0) check();
  world.barrier("rank 0 found no error");
  if (world.rank() != 0) check();
}

std::int64_t transform_lines(
    const std::string& path, ProcessGroup& world,
    const std::function<void(const std::string& text)>& print,
    const std::function<std::vector<std::string>(const std::vector<TextLine>&)>& transform) {
  std::optional<TextLines> lines;
  if (world.rank() == 0) lines.emplace(open_lines(path));
  for (std::int64_t num_lines = 0;;) {
    std::vector<std::string> round;  // a text and a place for each line
    while (world.rank() == 0 && round.size() < 2 * kLinesPerRound) {
      const std::optional<std::string_view> line = lines->next();
      if (!line) break;
      round.emplace_back(*line);
      round.push_back(lines->place());
    }
    round = unpacked(world.broadcast_bytes(packed(round), 0, "lines of text"));
    if (round.empty()) return num_lines;
    std::vector<TextLine> texts;
    for (std::size_t i = 0; i < round.size(); i += 2)
      texts.push_back({std::move(round[i]), std::move(round[i + 1]), num_lines++});
    const std::vector<std::string> results = transform(texts);
    if (world.rank() != 0) continue;
    std::string text;
    for (const std::string& result : results) (text += result) += '\n';
    print(text);
  }
}

void check_lines_on_ranks(const std::string& input) {
  if (input != "-") return;
  fail(
      ExitCode::kUsage,
      "--input -: standard input is read by one process; leave --ranks and --tensor out, or name a "
      "file");
}

}  // namespace birkhoff
