#include "launcher/measure/imitated_group.h"

#include <algorithm>
#include <utility>

namespace birkhoff {

ImitatedGroup::ImitatedGroup(NodeRanks ranks, at::Device device, bool gathers_in_rings,
                             std::vector<Exchange>* exchanges, GroupKind kind)
    : ranks_(ranks),
      device_(device),
      rings_(gathers_in_rings),
      exchanges_(exchanges),
      kind_(kind) {}

std::unique_ptr<Work> ImitatedGroup::do_all_reduce(at::Tensor tensor, ReduceOp op) {
  const double bytes = static_cast<double>(tensor.nbytes());
  if (ranks_.two_levels()) {
    count_levels(2 * bytes);
  } else {
    const double half = share_of_others(tensor);  // then the sums are gathered
    count(2 * half, rings_ ? half : 0);
  }
  if (op == ReduceOp::kSum) tensor.detach().mul_(size());
  return done_work();
}

std::unique_ptr<Work> ImitatedGroup::do_reduce_scatter(at::Tensor output, at::Tensor input,
                                                       ReduceOp op) {
  if (ranks_.two_levels()) {
    count_levels(static_cast<double>(input.nbytes()));
  } else {
    count(share_of_others(input));
  }
  const at::Tensor slice = output.detach().view({-1});
  slice.copy_(input.detach().view({-1}).narrow(0, rank() * slice.numel(), slice.numel()));
  if (op == ReduceOp::kSum) slice.mul_(size());
  return done_work();
}

std::unique_ptr<Work> ImitatedGroup::do_all_gather(at::Tensor output, at::Tensor input) {
  if (ranks_.two_levels()) {
    count_levels(static_cast<double>(output.nbytes()));
  } else {
    const double sent = share_of_others(output);
    count(sent, rings_ ? sent : 0);
  }
  const at::Tensor slice = input.detach().view({-1});
  for (int i = 0; i < size(); ++i) {
    const at::Tensor to = output.detach().view({-1}).narrow(0, i * slice.numel(), slice.numel());
    if (to.const_data_ptr() != slice.const_data_ptr() || to.is_meta()) to.copy_(slice);
  }
  return done_work();
}

std::unique_ptr<Work> ImitatedGroup::do_all_to_all(at::Tensor output,
                                                   std::vector<std::int64_t> receive_counts,
                                                   at::Tensor input,
                                                   std::vector<std::int64_t> send_counts) {
  count(share_of_others(input));
  std::int64_t to = 0, from = 0;
  for (int i = 0; i < rank(); ++i) from += send_counts[static_cast<std::size_t>(i)];
  for (const std::int64_t elements : receive_counts) {
    output.detach()
        .narrow(0, to, elements)
        .copy_(input.detach().narrow(0, std::min(from, input.numel() - elements), elements));
    to += elements;
  }
  return done_work();
}

std::unique_ptr<Work> ImitatedGroup::do_broadcast(at::Tensor tensor, int) {
  count(share_of_others(tensor));
  return done_work();
}

std::unique_ptr<Work> ImitatedGroup::do_barrier() {
  count(0);
  return done_work();
}

double ImitatedGroup::share_of_others(const at::Tensor& tensor) const {
  return static_cast<double>(tensor.nbytes()) * (size() - 1) / size();
}

void ImitatedGroup::count(double sent_bytes, double ring_bytes) {
  Exchange* const exchange = next_operation();
  if (exchange == nullptr) return;
  exchange->sent_bytes += sent_bytes;
  switch (kind_) {
    case GroupKind::kNode:
      exchange->inside_node_bytes += sent_bytes;
      break;
    case GroupKind::kNodes:
      exchange->between_nodes_bytes += sent_bytes;
      break;
    case GroupKind::kData:
    case GroupKind::kReplica:
      exchange->ring_bytes += ring_bytes;
      break;
  }
}

void ImitatedGroup::count_levels(double bytes) {
  Exchange* const exchange = next_operation();
  if (exchange == nullptr) return;
  const double ranks = ranks_.node_ranks, nodes = ranks_.nodes();
  const double inside = bytes * (ranks - 1) / ranks, between = bytes / ranks * (nodes - 1) / nodes;
  exchange->sent_bytes += inside + between;
  exchange->inside_node_bytes += inside;
  exchange->between_nodes_bytes += between;
}

Exchange* ImitatedGroup::next_operation() {
  if (exchanges_ == nullptr) return nullptr;
  const OperationRing::Entry entry = ring().current();
  // The gradients of all buckets ("gradients of bucket 3") have one purpose.
  const std::string what = entry.name.substr(0, entry.name.find(" of bucket "));
  const bool in_replica = kind_ == GroupKind::kReplica;
  auto found = std::ranges::find_if(*exchanges_, [&](const Exchange& each) {
    return each.what == what && each.in_replica == in_replica;
  });
  if (found == exchanges_->end()) {
    exchanges_->push_back(
        {.what = what, .in_backward_pass = what == "gradients", .in_replica = in_replica});
    found = exchanges_->end() - 1;
  }
  ++found->operations;
  found->bytes += entry.bytes;
  return &*found;
}

std::unique_ptr<ProcessGroup> imitated_tensor_axis(int ranks, at::Device device) {
  if (ranks == 1) return make_single_group(device);
  return std::make_unique<ImitatedGroup>(NodeRanks{.rank = 0, .size = ranks, .node_ranks = 1},
                                         device);
}

}  // namespace birkhoff
