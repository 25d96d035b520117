// Lines of text in, a line of results for each out, computed in batches and divided over replicas
// of a model. The results do not depend on how many there are: batches are the same, and each is
// computed by one replica.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cluster/base/collectives/process_group.h"

namespace birkhoff {

struct TextLine {
  std::string text, place;  // "PATH:LINE"
  std::int64_t number = 0;  // from 0
};

// The items of each batch, by their positions in `lengths`.
using Batches = std::vector<std::vector<std::size_t>>;
// Batches of items of about equal lengths, or exactly equal ones: the longest first, at most
// max_items of them, and at most max_elements when all are padded to the longest; a longer item is
// a batch of its own.
Batches batches_by_length(const std::vector<std::int64_t>& lengths, std::int64_t max_items,
                          std::int64_t max_elements, bool equal_lengths = false);
// The logits of a batch whose tokens are given: 64 MiB in fp32.
inline constexpr std::int64_t kMaxBatchLogits = std::int64_t{1} << 24;

// The results of all items, in their order, on all ranks. `compute` returns those of a batch.
// Calls `done` with the number of items that this rank has computed. Collective over `replicas`,
// the host group of the ranks that divide the batches.
std::vector<std::string> compute_on_ranks(
    ProcessGroup& replicas, const Batches& batches,
    const std::function<std::vector<std::string>(const std::vector<std::size_t>&)>& compute,
    const std::function<void(std::int64_t)>& done);

// Calls `check` on rank 0, and then on the others: an error ends the ranks before they report it
// again. Collective over world.
void check_on_rank_0_first(ProcessGroup& world, const std::function<void()>& check);

// Reads the lines of a file (launcher/commands/text_input.h) on rank 0, a few thousand at a time,
// and gives them to `transform` on all ranks, which returns a result for each. Before it reads
// more, rank 0 passes the results to `print`, with line feeds. Returns the number of lines.
// Collective over world.
std::int64_t transform_lines(
    const std::string& path, ProcessGroup& world,
    const std::function<void(const std::string& text)>& print,
    const std::function<std::vector<std::string>(const std::vector<TextLine>&)>& transform);

// Error(kUsage) if lines come from standard input, which only one process can read.
void check_lines_on_ranks(const std::string& input);

}  // namespace birkhoff
