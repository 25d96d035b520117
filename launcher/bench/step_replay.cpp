#include "launcher/bench/step_replay.h"

#include <ATen/ops/zeros.h>

#include <chrono>
#include <memory>
#include <thread>
#include <utility>

#include "cluster/base/error.h"
#include "cluster/base/gpu/device.h"
#include "launcher/measure/report.h"

namespace birkhoff {
namespace {

constexpr std::int64_t kFloatBytes = 4;

// Waits in place of computation. The system wakes a thread a little late: a wait that was too long
// shortens the next one.
class TimedWaits {
 public:
  void wait(double seconds) {
    constexpr double kShortest = 1e-4;
    left_ += seconds;
    if (left_ < kShortest) return;
    const double begin = clock_seconds();
    std::this_thread::sleep_for(std::chrono::duration<double>(left_));
    left_ -= clock_seconds() - begin;
  }

 private:
  double left_ = 0;
};

// Starts the operation, or carries it out if its caller waits; then null.
std::unique_ptr<Work> start(ProcessGroup& group, const ScheduledOperation& operation,
                            const at::Tensor& output, const at::Tensor& input) {
  const std::string& name = operation.purpose;
  std::unique_ptr<Work> work;
  switch (operation.what) {
    case Collective::kAllReduce:
      if (operation.caller_waits) {
        group.all_reduce(output, ReduceOp::kSum, name);
      } else {
        work = group.all_reduce_async(output, ReduceOp::kSum, name);
      }
      break;
    case Collective::kReduceScatter:
      if (operation.caller_waits) {
        group.reduce_scatter(output, input, ReduceOp::kSum, name);
      } else {
        work = group.reduce_scatter_async(output, input, ReduceOp::kSum, name);
      }
      break;
    case Collective::kAllGather:
      if (operation.caller_waits) {
        group.all_gather(output, input, name);
      } else {
        work = group.all_gather_async(output, input, name);
      }
      break;
    case Collective::kAllToAll: {
      const std::vector<std::int64_t> counts(static_cast<std::size_t>(group.size()),
                                             input.numel() / group.size());
      if (operation.caller_waits) {
        group.all_to_all(output, counts, input, counts, name);
      } else {
        work = group.all_to_all_async(output, counts, input, counts, name);
      }
      break;
    }
    case Collective::kBroadcast:
      group.broadcast(output, 0, name);
  }
  return work;
}

}  // namespace

ProcessGroup& StepReplay::group(const ScheduledOperation& operation) {
  switch (operation.group) {
    case GroupKind::kWorld:
      return world_.group();
    case GroupKind::kData:
      return mesh_.data();
    case GroupKind::kTensor:
      return mesh_.tensor();
    case GroupKind::kInsideNodes:
      return *mesh_.nodes()->inside;
    case GroupKind::kAcrossNodes:
      return *mesh_.nodes()->across;
  }
  require(false, "a group of another kind");
  return world_.group();
}

StepReplay::Tensors StepReplay::take_tensors(const ScheduledOperation& operation) {
  auto& kept = free_[{operation.group, operation.what, operation.bytes}];
  if (!kept.empty()) {
    Tensors tensors = std::move(kept.back());
    kept.pop_back();
    return tensors;
  }
  ProcessGroup& ranks = group(operation);
  const auto tensor = [&](std::int64_t elements) {
    return at::zeros({elements}, at::TensorOptions(at::kFloat).device(ranks.device()));
  };
  const std::int64_t elements = operation.bytes / kFloatBytes;
  const std::int64_t part = (elements + ranks.size() - 1) / ranks.size();
  switch (operation.what) {
    case Collective::kReduceScatter:
      return {tensor(part), tensor(part * ranks.size())};
    case Collective::kAllGather:
      return {tensor(part * ranks.size()), tensor(part)};
    case Collective::kAllToAll:
      return {tensor(part * ranks.size()), tensor(part * ranks.size())};
    case Collective::kAllReduce:
    case Collective::kBroadcast:
      break;
  }
  return {tensor(elements), {}};
}

void StepReplay::give_back(const ScheduledOperation& operation, Tensors tensors) {
  // On a GPU a wait only orders later work of the stream; here the host stands for that work.
  synchronize(group(operation).device());
  free_[{operation.group, operation.what, operation.bytes}].push_back(std::move(tensors));
}

double StepReplay::run() {
  world_.group().barrier("bench");
  std::vector<Running> running(schedule_.operations.size());
  TimedWaits computation;
  const double begin = clock_seconds();
  for (const ScheduledEvent& event : schedule_.events) {
    if (event.kind == ScheduledEvent::Kind::kCompute) {
      computation.wait(event.amount);
      continue;
    }
    const ScheduledOperation& operation = schedule_.operations[event.operation];
    auto& [work, tensors] = running[event.operation];
    if (event.kind == ScheduledEvent::Kind::kStart) {
      tensors = take_tensors(operation);
      work = start(group(operation), operation, tensors.output, tensors.input);
    } else {
      if (work != nullptr) work->wait();
      give_back(operation, std::move(tensors));
    }
  }
  return clock_seconds() - begin;
}

}  // namespace birkhoff
