#include "launcher/bench/collectives.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <fmt/format.h>

#include <vector>

#include "cluster/base/random/philox.h"

namespace birkhoff {
namespace {

// Values below 1/8, of either sign and many magnitudes, so that the rounding of their sums depends
// on the order. Only exact operations and single products compute them, so that all machines
// produce the same bits.
at::Tensor values_of_rank(int rank, std::int64_t count) {
  const NoiseKey key{.seed = 1,
                     .step = at::full({1}, 0, at::kLong),
                     .layer = 0,
                     .sample_ids_B = at::full({1}, rank, at::kLong)};
  const at::Tensor x = philox_uniform(key, NoisePurpose::kInit, {count}).view({count}) - 0.5;
  return x * x * x;
}

at::Tensor sum_in_order(std::int64_t count, const NodeRanks& ranks) {
  const auto of_node = [&](int node) {
    at::Tensor sum = values_of_rank(ranks.at(node, 0), count);
    for (int i = 1; i < ranks.node_ranks; ++i) sum += values_of_rank(ranks.at(node, i), count);
    return sum;
  };
  at::Tensor sum = of_node(0);
  for (int node = 1; node < ranks.nodes(); ++node) sum += of_node(node);
  return sum;
}

}  // namespace

double bus_factor(Collective what, int ranks) {
  if (what == Collective::kBroadcast) return 1;
  const double others = (ranks - 1.0) / ranks;  // share of the data that other ranks hold
  return what == Collective::kAllReduce ? 2 * others : others;
}

RunCollective group_collectives(ProcessGroup& group) {
  return [&group, counts = std::vector<std::int64_t>()](Collective what, const at::Tensor& output,
                                                        const at::Tensor& input) mutable {
    switch (what) {
      case Collective::kAllReduce:
        return group.all_reduce(output, ReduceOp::kSum, "bench");
      case Collective::kReduceScatter:
        return group.reduce_scatter(output, input, ReduceOp::kSum, "bench");
      case Collective::kAllGather:
        return group.all_gather(output, input, "bench");
      case Collective::kAllToAll: {
        counts.assign(static_cast<std::size_t>(group.size()), input.numel() / group.size());
        return group.all_to_all(output, counts, input, counts, "bench");
      }
      case Collective::kBroadcast:
        return group.broadcast(output, 0, "bench");
    }
  };
}

CollectiveTensors make_tensors(Collective what, std::int64_t count, int rank, int ranks) {
  const bool in_place = what == Collective::kAllReduce || what == Collective::kBroadcast;
  if (in_place) return {values_of_rank(rank, count), {}};
  const std::int64_t part = count / ranks;
  return {at::empty({what == Collective::kReduceScatter ? part : count}),
          values_of_rank(rank, what == Collective::kAllGather ? part : count)};
}

at::Tensor expected_output(Collective what, std::int64_t count, const NodeRanks& ranks) {
  if (what == Collective::kBroadcast) return values_of_rank(0, count);
  if (what == Collective::kAllReduce) return sum_in_order(count, ranks);
  const std::int64_t part = count / ranks.size, first = ranks.rank * part;
  if (what == Collective::kReduceScatter) return sum_in_order(count, ranks).narrow(0, first, part);
  std::vector<at::Tensor> parts;
  for (int peer = 0; peer < ranks.size; ++peer) {
    parts.push_back(what == Collective::kAllGather
                        ? values_of_rank(peer, part)
                        : values_of_rank(peer, count).narrow(0, first, part).clone());
  }
  return at::cat(parts);
}

std::string first_difference(const at::Tensor& output, const at::Tensor& expected) {
  const at::Tensor same = output.view(at::kInt) == expected.view(at::kInt);
  if (same.all().item<bool>()) return "";
  const auto i = same.logical_not().nonzero()[0].item<std::int64_t>();
  return fmt::format("element {} is {:.9g} and should be {:.9g}", i,
                     output.const_data_ptr<float>()[i], expected.const_data_ptr<float>()[i]);
}

}  // namespace birkhoff
