#include "launcher/measure/step_schedule.h"

#include <algorithm>
#include <utility>

#include "cluster/mesh.h"

namespace birkhoff {

const char* collective_name(Collective what) {
  constexpr const char* kNames[] = {"all_reduce", "reduce_scatter", "all_gather", "all_to_all",
                                    "broadcast"};
  return kNames[static_cast<std::size_t>(what)];
}

MeshShape mesh_shape(const configs::Config& config, int num_ranks) {
  const configs::Mesh& mesh = config.mesh();
  const int tensor = mesh.tensor(), data = num_ranks / tensor;
  const bool gpus = config.device() == configs::Config::cuda;
  const auto shape = [&](int size, int stride, int node_ranks = 1) {
    return GroupShape{.ranks = {.rank = 0, .size = size, .node_ranks = node_ranks},
                      .stride = stride,
                      .on_gpus = gpus,
                      .ring_sums = gpus && mesh.nccl_reductions()};
  };
  const int node_ranks = std::max(1, mesh.ranks_per_node());
  MeshShape groups;
  const auto group = [&](GroupKind kind) -> GroupShape& {
    return groups[static_cast<std::size_t>(kind)];
  };
  group(GroupKind::kWorld).ranks.size = num_ranks;  // on hosts
  group(GroupKind::kData) = shape(data, tensor, mesh.nccl_reductions() ? 1 : node_ranks);
  group(GroupKind::kTensor) = shape(tensor, 1);
  if (has_node_slices(mesh) && data > 1) {
    group(GroupKind::kInsideNodes) = shape(node_ranks, tensor);
    group(GroupKind::kAcrossNodes) = shape(data / node_ranks, tensor * node_ranks);
  }
  return groups;
}

double StepSchedule::amount(StepPart part) const {
  double sum = 0;
  for (const ScheduledEvent& event : events) sum += event.part == part ? event.amount : 0;
  return sum;
}

void StepSchedule::scale(StepPart part, double seconds) {
  const double now = amount(part);
  if (now > 0) {
    for (ScheduledEvent& event : events) {
      if (event.part == part) event.amount *= seconds / now;
    }
    return;
  }
  const auto later =
      std::ranges::find_if(events, [&](const ScheduledEvent& event) { return event.part > part; });
  events.insert(later, {.part = part, .amount = seconds});
}

// ---- Transfers

std::vector<TransferPhase> phases_of(const ScheduledOperation& operation, const GroupShape& shape,
                                     int ranks_per_node) {
  const NodeRanks& ranks = shape.ranks;
  if (ranks.size == 1) return {};
  const auto bytes = static_cast<double>(operation.bytes);
  // Of a group of ranks, how many are on one node.
  const auto on_node = [&](int size, int stride) {
    return std::clamp((ranks_per_node + stride - 1) / stride, 1, size);
  };
  // Each rank sends `piece` bytes to each other rank, or passes pieces on along a ring, in which
  // one rank of a node sends to another node.
  const auto exchange = [&](int size, int stride, double piece, bool ring) {
    const double all = piece * (size - 1);
    const int here = on_node(size, stride);
    const double between = here == size ? 0 : ring ? all / here : piece * (size - here);
    return TransferPhase{all - between, between, ring ? size - 1 : 1};
  };
  const bool sums_and_gathers = operation.what == Collective::kAllReduce;
  if (ranks.two_levels() && operation.what != Collective::kAllToAll &&
      operation.what != Collective::kBroadcast) {
    const int in_node = ranks.node_ranks, nodes = ranks.nodes();
    const TransferPhase inside = exchange(in_node, shape.stride, bytes / in_node, false);
    const TransferPhase between =
        exchange(nodes, shape.stride * in_node, bytes / ranks.size, false);
    if (sums_and_gathers && is_small(operation.bytes, ranks.size, shape.on_gpus)) {
      return {exchange(ranks.size, shape.stride, bytes, false)};
    }
    if (sums_and_gathers) return {inside, between, between, inside};
    if (operation.what == Collective::kReduceScatter) return {inside, between};
    return {between, inside};
  }
  const double piece = bytes / ranks.size;
  switch (operation.what) {
    case Collective::kAllReduce: {
      if (!shape.ring_sums && is_small(operation.bytes, ranks.size, shape.on_gpus)) {
        return {exchange(ranks.size, shape.stride, bytes, shape.on_gpus)};
      }
      const bool even = operation.bytes / operation.element_bytes % ranks.size == 0;
      return {
          exchange(ranks.size, shape.stride, piece, shape.ring_sums),
          exchange(ranks.size, shape.stride, piece, shape.ring_sums || (shape.on_gpus && even))};
    }
    case Collective::kReduceScatter:
      return {exchange(ranks.size, shape.stride, piece, shape.ring_sums)};
    case Collective::kAllGather:
      return {exchange(ranks.size, shape.stride, piece, shape.on_gpus)};
    case Collective::kAllToAll:
    case Collective::kBroadcast:
      return {exchange(ranks.size, shape.stride, piece, false)};
  }
  return {};
}

std::vector<Exchange> exchanges_of(const StepSchedule& schedule, const MeshShape& mesh,
                                   int ranks_per_node) {
  std::vector<Exchange> exchanges;
  for (const ScheduledOperation& each : schedule.operations) {
    auto found = std::ranges::find_if(exchanges, [&](const Exchange& exchange) {
      return exchange.what == each.purpose && exchange.group == each.group;
    });
    if (found == exchanges.end()) {
      exchanges.push_back({.what = each.purpose, .group = each.group});
      found = exchanges.end() - 1;
    }
    ++found->operations;
    found->bytes += each.input_bytes;
    const GroupShape& shape = mesh[static_cast<std::size_t>(each.group)];
    for (const TransferPhase& phase : phases_of(each, shape, ranks_per_node)) {
      found->sent_bytes += phase.inside_bytes + phase.between_bytes;
      found->sent_to_other_nodes += phase.between_bytes;
    }
  }
  return exchanges;
}

// ---- StepRecorder

class StepRecorder::RecordedWait : public Work {
 public:
  RecordedWait(StepRecorder& recorder, std::size_t operation)
      : recorder_(recorder), operation_(operation) {}
  void wait() override {
    recorder_.add_computation();
    recorder_.schedule_.events.push_back(
        {.kind = ScheduledEvent::Kind::kWait, .part = recorder_.part_, .operation = operation_});
  }

 private:
  StepRecorder& recorder_;
  const std::size_t operation_;
};

void StepRecorder::restart() {
  schedule_ = {};
  part_ = StepPart::kForward;
  last_ = clock_();
}

void StepRecorder::begin(StepPart part) {
  add_computation();
  part_ = part;
}

void StepRecorder::add_computation() {
  const double now = clock_();
  schedule_.events.push_back({.part = part_, .amount = now - last_});
  last_ = now;
}

std::unique_ptr<Work> StepRecorder::start(ScheduledOperation operation) {
  add_computation();
  const std::size_t number = schedule_.operations.size();
  schedule_.operations.push_back(std::move(operation));
  schedule_.events.push_back(
      {.kind = ScheduledEvent::Kind::kStart, .part = part_, .operation = number});
  return std::make_unique<RecordedWait>(*this, number);
}

StepSchedule StepRecorder::finish() {
  add_computation();
  return schedule_;
}

}  // namespace birkhoff
