// Copies batches to the compute device, one batch ahead of the computation.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <optional>

#include "data/batch/batch.h"

namespace birkhoff {

class DevicePrefetcher {
 public:
  // `next` returns batches in host memory, all of one shape; nullopt: it gives up waiting for one.
  // On a GPU they are copied through pinned memory on a separate stream while the previous batch is
  // being computed; on the CPU they are passed on unchanged.
  DevicePrefetcher(std::function<std::optional<Batch>()> next, at::Device device);
  ~DevicePrefetcher();

  // Returns the next batch on the device, nullopt if `next` gives up. On a GPU its buffers are
  // reused after the following next(), once the work queued on the current stream until then has
  // finished. Errors of `next`. Local.
  std::optional<Batch> next();
  // On a GPU: fetches the batch that the following next() returns and starts copying it. Call it
  // once the current computation is queued on the stream: the host has nothing else to do then. The
  // following next() throws the errors of `next`. Local.
  void prefetch();
  // Milliseconds spent in `next` so far.
  double waited_ms() const { return waited_ms_; }

 private:
  class Gpu;
  std::optional<Batch> timed_next();

  std::function<std::optional<Batch>()> next_;
  double waited_ms_ = 0;
  std::unique_ptr<Gpu> gpu_;  // null on the CPU
};

}  // namespace birkhoff
