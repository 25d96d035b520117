// Runs a few layers of a model on a few sequences, on this machine's CPU, and concludes from them
// what all layers need on a rank's micro-batch. Memory and time grow linearly with the number of
// layers and of sequences, so two numbers of each are enough; where the whole fits, it is run
// itself. Local.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>

#include "configs/config.pb.h"

namespace birkhoff {

class PeakMemory;

// Bytes of LibTorch's tensors that one micro-batch takes besides the state.
struct TrialMemory {
  double layers = 0;      // kept by the layers for the backward pass
  double rest = 0;        // kept by embedding, output, loss and their sums
  double temporary = 0;   // more than that at the step's peak
  double evaluation = 0;  // peak of evaluate.micro_batch sequences without gradients
};

// Seconds of one micro-batch's passes and of an update, and speeds of the machine in between.
struct TrialTimes {
  double forward = 0, backward = 0, optimizer = 0;
  double product_flops = 0;  // FLOP/s of at::mm on 1024x1024 matrices
  double copy_bytes = 0;     // bytes read and written per second by a copy of 64 MB
};

// What a step of a trial may take: about a second, and what a login node can spare.
struct TrialLimits {
  double flops = 3e11, bytes = 1e9;
};

class Trial {
 public:
  // config: resolved. Its device is ignored, fp16 is run as bf16, and virtual shards and documents
  // are left out.
  Trial(const configs::Config& config, std::int64_t vocabulary, std::int64_t micro_batch,
        TrialLimits limits = {});
  ~Trial();
  Trial(const Trial&) = delete;
  Trial& operator=(const Trial&) = delete;

  // FLOPs of the forward pass of all layers, which is what train.recompute repeats.
  double layers_flops_per_sequence() const { return flops_of_layers_; }
  // FLOPs of the smallest step that says enough.
  double least_flops() const;

  // Counts with a PeakMemory.
  TrialMemory memory();

  // Medians of interleaved rounds, next to `neighbours` threads that train as well: the other
  // ranks of the machine. Call memory() first.
  TrialTimes times(int rounds, int neighbours);

 private:
  class Point;
  // Two numbers of layers or sequences that are run, and the one wanted.
  struct Axis {
    std::int64_t low = 1, high = 1, wanted = 1;
    double extrapolate(double at_low, double at_high, double to) const;
  };
  using PointValue = std::function<double(const Point&)>;

  double flops(std::int64_t layers, std::int64_t sequences) const;
  void choose_axes();
  // So many layers with each number of sequences; null where the numbers are equal.
  std::array<std::unique_ptr<Point>, 2> make_points(std::int64_t layers, PeakMemory& memory) const;
  const Point& point(int layers, int sequences) const;
  // For all layers on so many sequences.
  double extrapolate(double sequences, const PointValue& value) const;

  const configs::Config config_;
  const std::int64_t vocabulary_;
  const TrialLimits limits_;
  // Of a sequence's forward pass; that of a layer is a mean.
  double flops_without_layers_ = 0, flops_of_layer_ = 0, flops_of_layers_ = 0;
  Axis layers_, sequences_;
  std::int64_t affordable_ = 1;  // sequences within the limits
  // By number of layers and of sequences; null where the numbers are equal.
  std::array<std::array<std::unique_ptr<Point>, 2>, 2> points_;
};

}  // namespace birkhoff
