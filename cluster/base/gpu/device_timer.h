// A timer of a device's work. On a GPU, where the host only queues the work, it measures between
// two points of the calling thread's current stream; on the CPU, between two calls.
#pragma once

#include <c10/core/Device.h>

#include <memory>

namespace birkhoff {

class DeviceTimer {
 public:
  // A GPU must be the current device. Local, as are all calls.
  explicit DeviceTimer(at::Device device);
  ~DeviceTimer();

  void start();
  void stop();
  // Seconds between the last start() and stop(). On a GPU it blocks until the work is done.
  double seconds() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace birkhoff
