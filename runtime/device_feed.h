// Brings batches to the device of the computation, one ahead of it.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>

#include "data/batch/batch.h"

namespace birkhoff {

class DeviceFeed {
 public:
  // `next` gives batches in host memory, all of one shape. On a GPU they are copied through pinned
  // memory on a stream of their own while the batch before is computed with; on the CPU they are
  // passed on as they are.
  DeviceFeed(std::function<Batch()> next, at::Device device);
  ~DeviceFeed();

  // The next batch on the device. On a GPU its memory is filled again behind the next call, when
  // what was put into the current stream until then has run. Errors of `next`. Local.
  Batch next();
  // On a GPU: fetches the batch that next() will give, and starts its way to the device. To be
  // called when the computation with the current one is in the stream: the host has nothing else to
  // do then. Errors of `next`. Local.
  void prefetch();
  // Milliseconds that calls of `next` have taken so far.
  double waited_ms() const { return waited_ms_; }

 private:
  class Gpu;
  Batch timed_next();

  std::function<Batch()> next_;
  double waited_ms_ = 0;
  std::unique_ptr<Gpu> gpu_;  // null on the CPU
};

}  // namespace birkhoff
