#include "launcher/measure/imitated_group.h"

#include <algorithm>

namespace birkhoff {
namespace {

ImitatedGroup group_of(const MeshShape& shape, GroupKind kind, at::Device device,
                       StepRecorder* recorder) {
  return {kind, shape[static_cast<std::size_t>(kind)].ranks, device, recorder};
}

}  // namespace

ImitatedGroup::ImitatedGroup(GroupKind kind, NodeRanks ranks, at::Device device,
                             StepRecorder* recorder)
    : kind_(kind), ranks_(ranks), device_(device), recorder_(recorder) {}

template <typename Imitate>
std::unique_ptr<Work> ImitatedGroup::record(Collective what, const at::Tensor& longer,
                                            const Imitate& imitate) {
  if (recorder_ == nullptr || size() == 1) {
    imitate();
    return done_work();
  }
  const OperationRing::Entry entry = ring().current();
  // The gradients of all buckets ("gradients of bucket 3") have one purpose.
  auto work = recorder_->start({.group = kind_,
                                .what = what,
                                .purpose = entry.name.substr(0, entry.name.find(" of bucket ")),
                                .input_bytes = entry.bytes,
                                .bytes = static_cast<std::int64_t>(longer.nbytes()),
                                .element_bytes = static_cast<std::int64_t>(longer.itemsize()),
                                .caller_waits = caller_waits()});
  imitate();
  recorder_->go_on();
  return work;
}

std::unique_ptr<Work> ImitatedGroup::do_all_reduce(at::Tensor tensor, ReduceOp op) {
  return record(Collective::kAllReduce, tensor, [&] {
    if (op == ReduceOp::kSum) tensor.detach().mul_(size());
  });
}

std::unique_ptr<Work> ImitatedGroup::do_reduce_scatter(at::Tensor output, at::Tensor input,
                                                       ReduceOp op) {
  return record(Collective::kReduceScatter, input, [&] {
    const at::Tensor slice = output.detach().view({-1});
    slice.copy_(input.detach().view({-1}).narrow(0, rank() * slice.numel(), slice.numel()));
    if (op == ReduceOp::kSum) slice.mul_(size());
  });
}

std::unique_ptr<Work> ImitatedGroup::do_all_gather(at::Tensor output, at::Tensor input) {
  return record(Collective::kAllGather, output, [&] {
    const at::Tensor slice = input.detach().view({-1});
    for (int i = 0; i < size(); ++i) {
      const at::Tensor to = output.detach().view({-1}).narrow(0, i * slice.numel(), slice.numel());
      if (to.const_data_ptr() != slice.const_data_ptr() || to.is_meta()) to.copy_(slice);
    }
  });
}

std::unique_ptr<Work> ImitatedGroup::do_all_to_all(at::Tensor output, Counts receive_counts,
                                                   at::Tensor input, Counts send_counts) {
  return record(Collective::kAllToAll, input.numel() > output.numel() ? input : output, [&] {
    std::int64_t to = 0, from = 0;
    for (int i = 0; i < rank(); ++i) from += send_counts[static_cast<std::size_t>(i)];
    for (const std::int64_t elements : receive_counts) {
      output.detach()
          .narrow(0, to, elements)
          .copy_(input.detach().narrow(0, std::min(from, input.numel() - elements), elements));
      to += elements;
    }
  });
}

std::unique_ptr<Work> ImitatedGroup::do_broadcast(at::Tensor tensor, int) {
  return record(Collective::kBroadcast, tensor, [] {});
}

ImitatedMesh::ImitatedMesh(const MeshShape& shape, at::Device device, StepRecorder* recorder)
    : world_(group_of(shape, GroupKind::kWorld, at::kCPU, recorder)),
      data_(group_of(shape, GroupKind::kData, device, recorder)),
      tensor_(group_of(shape, GroupKind::kTensor, device, recorder)),
      inside_(group_of(shape, GroupKind::kInsideNodes, device, recorder)),
      across_(group_of(shape, GroupKind::kAcrossNodes, device, recorder)) {}

std::optional<NodeGroups> ImitatedMesh::nodes() {
  if (inside_.size() == 1) return std::nullopt;
  return NodeGroups{&inside_, &across_};
}

}  // namespace birkhoff
