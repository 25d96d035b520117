// Runs a part of a training step as a CUDA graph (train.cuda_graph): its launches are recorded once
// and started together, and its batch stays at one address.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>

#include "data/batch/batch.h"

namespace birkhoff {

// One part of a step. Each call must queue the same operations on the same memory on the current
// stream: values that change from step to step are read from device memory, and the part neither
// waits for the device nor branches on a result. Tensors that it makes and keeps are overwritten by
// each run.
class StepGraph {
 public:
  // Runs before the recording, without a graph: libraries choose algorithms and allocate
  // workspaces, which must not be recorded. Three, as PyTorch's notes on CUDA graphs advise.
  static constexpr int kWarmUpRuns = 3;

  // If not `recorded`, every run calls the part.
  StepGraph(bool recorded, at::Device device) : recorded_(recorded), device_(device) {}

  // Does what `part` does. The first run after the warm-up records it on the current stream, which
  // must not be the default stream (cuda_device() ensures that); later runs replay the recording
  // and do not call `part`. On the CPU nothing is recorded; later runs call that run's `part` again
  // instead of their own, so values that it captured stay fixed as in a graph. Error(kInternal) if
  // it cannot be recorded, Error(kMemory) if the device lacks the memory. Local; asynchronous.
  void run(const std::function<void()>& part);

 private:
  const bool recorded_;
  const at::Device device_;
  std::int64_t num_runs_ = 0;
  std::function<void()> replay_;  // empty: not recorded yet
};

// A copy of the current batch, always at the same address.
class StaticBatch {
 public:
  // Returns a copy of `batch` in memory that the next call overwrites, in the order of the current
  // stream. All batches must have the fields, shapes and types of the first: else Error(kInternal).
  // Local.
  const Batch& hold(const Batch& batch);

 private:
  Batch held_;
};

}  // namespace birkhoff
