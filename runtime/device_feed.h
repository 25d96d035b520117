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

  // The next batch on the device. On a GPU its memory is filled again by the next call but one,
  // when what was put into the current stream until the next call has run. Errors of `next`. Local.
  Batch next();

 private:
  class Gpu;
  std::function<Batch()> next_;
  std::unique_ptr<Gpu> gpu_;  // null on the CPU
};

}  // namespace birkhoff
