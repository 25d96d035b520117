// What lets a part of a training step run as a CUDA graph (train.cuda_graph): its launches,
// recorded once and started together, and a batch that stays in one place.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>

#include "data/batch/batch.h"

namespace birkhoff {

// One part of a step. It must put the same operations on the same memory into the current stream
// each time: whatever differs from step to step stands in device memory, the part does not wait for
// the device, and it decides nothing by what it computed. Tensors that it makes and keeps are
// filled again by each run.
class StepGraph {
 public:
  // Runs before the recording, as the part stands: libraries choose algorithms and make workspaces,
  // which must not be recorded. Three, as PyTorch's notes on CUDA graphs advise.
  static constexpr int kWarmUpRuns = 3;

  // Not `recorded`: runs call the part, always.
  StepGraph(bool recorded, at::Device device) : recorded_(recorded), device_(device) {}

  // Does what `part` does. The run behind the warm-up records it, on the current stream, which must
  // not be the default one (cuda_device() sees to it); later runs start the recording and do not
  // call `part`. Nothing can be recorded on the CPU, where later runs call the recorded `part`
  // instead of theirs: with it stays what a recording would keep. Error(kInternal) if it cannot be
  // recorded, Error(kMemory) if the device has not enough memory. Local; asynchronous.
  void run(const std::function<void()>& part);

 private:
  const bool recorded_;
  const at::Device device_;
  std::int64_t num_runs_ = 0;
  std::function<void()> replay_;  // empty: not recorded yet
};

// A copy of the current batch, always in the same memory.
class FixedBatch {
 public:
  // `batch`, in memory that the next call fills again, in the order of the current stream. All
  // batches have the fields, shapes and types of the first: else Error(kInternal). Local.
  const Batch& hold(const Batch& batch);

 private:
  Batch held_;
};

}  // namespace birkhoff
