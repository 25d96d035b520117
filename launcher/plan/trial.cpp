#include "launcher/plan/trial.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <thread>
#include <vector>

#include "cluster/base/error.h"
#include "launcher/bench/peak_memory.h"
#include "launcher/bench/report.h"
#include "launcher/bench/synthetic_training.h"
#include "runtime/tasks/task.h"

namespace birkhoff {
namespace {

configs::Config part_of(configs::Config config, std::int64_t layers, std::int64_t sequences) {
  config.set_device(configs::Config::cpu);
  config.mutable_model()->set_layers(static_cast<int>(layers));
  configs::Train& train = *config.mutable_train();
  train.set_global_batch(static_cast<int>(sequences));
  train.set_micro_batch(0);
  train.set_cuda_graph(false);
  train.mutable_invariant()->set_shards(0);
  if (train.precision() == configs::Train::fp16) train.set_precision(configs::Train::bf16);
  return config;
}

double forward_flops(const configs::Config& config, std::int64_t vocabulary, std::int64_t layers) {
  const std::unique_ptr<ProcessGroup> one = make_single_group(at::kMeta);
  const configs::Config part = part_of(config, layers, 1);
  return make_model(part, vocabulary, {*one, *one, *one})->forward_flops_per_sequence();
}

// The other ranks of a machine: threads that train until this object's end.
class Neighbours {
 public:
  Neighbours(const configs::Config& config, std::int64_t vocabulary, int count) {
    const int threads = at::get_num_threads();
    for (int i = 0; i < count; ++i) {
      threads_.emplace_back([this, config, vocabulary, threads] {
        at::set_num_threads(threads);  // LibTorch keeps this number for each thread
        SyntheticTraining training(config, vocabulary, at::kCPU);
        for (++ready_; !stop_;) training.timed_parts();
      });
    }
    while (ready_ < count) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  ~Neighbours() {
    stop_ = true;
    for (std::thread& thread : threads_) thread.join();
  }
  Neighbours(const Neighbours&) = delete;
  Neighbours& operator=(const Neighbours&) = delete;

 private:
  std::atomic<int> ready_ = 0;
  std::atomic<bool> stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

class Trial::Point {
 public:
  Point(const configs::Config& config, std::int64_t vocabulary)
      : training_(config, vocabulary, at::kCPU) {}

  void count_memory(PeakMemory& memory) {
    training_.timed_parts();  // makes what later steps use again
    memory.restart();
    training_.timed_parts([&] { kept = static_cast<double>(memory.live_bytes()); });
    peak = static_cast<double>(memory.extra_bytes());
  }

  // The peak of an evaluation of the batch.
  double evaluation_bytes(PeakMemory& memory, const Batch& batch) {
    const at::NoGradGuard no_gradients;
    memory.restart();
    training_.model().loss_sums(batch, std::nullopt);
    return static_cast<double>(memory.extra_bytes());
  }

  void time() {
    const PartTimes seconds = training_.timed_parts();
    forward.push_back(seconds.forward);
    backward.push_back(seconds.backward);
    optimizer.push_back(seconds.optimizer);
  }

  double kept = 0, peak = 0;  // bytes
  std::vector<double> forward, backward, optimizer;

 private:
  SyntheticTraining training_;
};

Trial::Trial(const configs::Config& config, std::int64_t vocabulary, std::int64_t micro_batch,
             TrialLimits limits)
    : config_(config), vocabulary_(vocabulary), limits_(limits) {
  layers_.wanted = config.model().layers();
  sequences_.wanted = micro_batch;
  // Layers repeat with the period of model.attention.
  const std::int64_t period = config.model().attention_size(), rest = layers_.wanted % period;
  layers_.low = layers_.wanted < 2 * period ? layers_.wanted : period + rest;
  layers_.high = std::min(layers_.wanted, layers_.low + period);
  flops_without_layers_ = forward_flops(config, vocabulary, 0);
  flops_of_layers_ = forward_flops(config, vocabulary, layers_.wanted) - flops_without_layers_;
  flops_of_layer_ = (forward_flops(config, vocabulary, layers_.high) - flops_without_layers_) /
                    static_cast<double>(layers_.high);
}

Trial::~Trial() = default;

double Trial::flops(std::int64_t layers, std::int64_t sequences) const {
  return 3.0 * static_cast<double>(sequences) *
         (flops_without_layers_ + static_cast<double>(layers) * flops_of_layer_);
}

double Trial::least_flops() const {
  return flops(layers_.high, std::min<std::int64_t>(2, sequences_.wanted));
}

double Trial::Axis::extrapolate(double at_low, double at_high, double to) const {
  if (low == high) return at_low;
  return at_low +
         (at_high - at_low) * (to - static_cast<double>(low)) / static_cast<double>(high - low);
}

// As many sequences and then as many layers as a second or so allows.
void Trial::choose_axes() {
  PeakMemory memory(at::kCPU);
  double bytes_of_sequence = 0;
  {
    Point smallest(part_of(config_, layers_.high, 1), vocabulary_);
    smallest.count_memory(memory);
    bytes_of_sequence = std::max(smallest.peak, 1.0);
  }
  affordable_ = static_cast<std::int64_t>(std::max(
      1.0, std::min(limits_.flops / flops(layers_.high, 1), limits_.bytes / bytes_of_sequence)));
  sequences_.high = std::min(sequences_.wanted, affordable_);
  sequences_.low = sequences_.high;
  if (sequences_.high < sequences_.wanted) {
    sequences_.high = std::max<std::int64_t>(2, sequences_.high);
    sequences_.low = sequences_.high / 2;
    return;
  }
  const std::int64_t period = config_.model().attention_size();
  const auto next_fits = [&](std::int64_t layers) {
    const double times = static_cast<double>(layers) / static_cast<double>(layers_.low);
    return layers <= layers_.wanted && flops(layers, sequences_.high) <= limits_.flops &&
           bytes_of_sequence * static_cast<double>(sequences_.high) * times <= limits_.bytes;
  };
  while (next_fits(layers_.high + period)) layers_.high += period;
  if (layers_.high == layers_.wanted) layers_.low = layers_.high;
}

std::array<std::unique_ptr<Trial::Point>, 2> Trial::make_points(std::int64_t layers,
                                                                PeakMemory& memory) const {
  std::array<std::unique_ptr<Point>, 2> points;
  for (const int i : {0, 1}) {
    if (i == 1 && sequences_.low == sequences_.high) continue;
    auto& point = points[static_cast<std::size_t>(i)];
    point = std::make_unique<Point>(
        part_of(config_, layers, i == 0 ? sequences_.low : sequences_.high), vocabulary_);
    point->count_memory(memory);
  }
  return points;
}

const Trial::Point& Trial::point(int layers, int sequences) const {
  return *points_[static_cast<std::size_t>(layers_.low == layers_.high ? 0 : layers)]
                 [static_cast<std::size_t>(sequences_.low == sequences_.high ? 0 : sequences)];
}

double Trial::extrapolate(double sequences, const PointValue& value) const {
  const auto of_layers = [&](int layers) {
    return sequences_.extrapolate(value(point(layers, 0)), value(point(layers, 1)), sequences);
  };
  return layers_.extrapolate(of_layers(0), of_layers(1), static_cast<double>(layers_.wanted));
}

TrialMemory Trial::memory() {
  choose_axes();
  PeakMemory memory(at::kCPU);
  points_[0] = make_points(layers_.low, memory);
  if (layers_.low < layers_.high) points_[1] = make_points(layers_.high, memory);
  const auto without_layers = make_points(0, memory);

  const auto wanted = static_cast<double>(sequences_.wanted);
  TrialMemory bytes;
  const double kept = extrapolate(wanted, [](const Point& p) { return p.kept; });
  bytes.rest = sequences_.extrapolate(
      without_layers[0]->kept,
      (without_layers[1] != nullptr ? without_layers[1] : without_layers[0])->kept, wanted);
  bytes.layers = kept - bytes.rest;
  bytes.temporary = extrapolate(wanted, [](const Point& p) { return p.peak; }) - kept;
  // Without gradients a layer's tensors are gone when the next one runs, so any number of layers
  // will do.
  const std::int64_t evaluated = config_.evaluate().micro_batch();
  Axis evaluations;
  evaluations.high = std::min(evaluated, std::max<std::int64_t>(2, affordable_));
  evaluations.low = evaluations.high < evaluated ? evaluations.high / 2 : evaluations.high;
  const auto peak_of = [&](std::int64_t sequences) {
    return points_[0][0]->evaluation_bytes(
        memory, make_task(part_of(config_, layers_.low, sequences))->synthetic_batch(vocabulary_));
  };
  bytes.evaluation = evaluations.extrapolate(peak_of(evaluations.low), peak_of(evaluations.high),
                                             static_cast<double>(evaluated));
  return bytes;
}

TrialTimes Trial::times(int rounds, int neighbours) {
  require(points_[0][0] != nullptr, "memory() chooses what is timed");
  const Neighbours others(part_of(config_, layers_.high, sequences_.high), vocabulary_, neighbours);
  constexpr std::int64_t kMatrix = 1024, kCopy = 64 << 20;
  const bool wide = config_.train().precision() == configs::Train::fp32;
  const at::Tensor a =
      at::randn({kMatrix, kMatrix})
          .to(wide                                                  ? at::kFloat
              : config_.train().precision() == configs::Train::fp64 ? at::kDouble
                                                                    : at::kBFloat16);
  const at::Tensor from = at::empty({kCopy}, at::kByte).fill_(1), to = at::empty_like(from);
  std::vector<double> products, copies;
  const auto seconds_of = [](const auto& work) {
    const double start = wall_seconds();
    work();
    return wall_seconds() - start;
  };
  for (int round = 0; round < rounds; ++round) {
    for (auto& of_layers : points_) {
      for (auto& point : of_layers) {
        if (point != nullptr) point->time();
      }
    }
    products.push_back(seconds_of([&] { at::mm(a, a); }));
    copies.push_back(seconds_of([&] { to.copy_(from); }));
  }
  const auto wanted = static_cast<double>(sequences_.wanted);
  const auto typical = [&](std::vector<double> Point::*seconds) {
    return extrapolate(wanted, [&](const Point& p) { return median(p.*seconds); });
  };
  TrialTimes times;
  times.forward = typical(&Point::forward);
  times.backward = typical(&Point::backward);
  times.optimizer = typical(&Point::optimizer);
  times.product_flops = 2 * std::pow(static_cast<double>(kMatrix), 3) / median(products);
  times.copy_bytes = 2 * static_cast<double>(kCopy) / median(copies);
  return times;
}

}  // namespace birkhoff
