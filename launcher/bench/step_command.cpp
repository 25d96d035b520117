// One process, synthetic tokens: the time of a training step (runtime/training_step) without a
// loader.
#include <ATen/TensorOperators.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "cluster/base/cpu.h"
#include "cluster/base/error.h"
#include "cluster/base/gpu/device.h"
#include "configs/loader/check.h"
#include "configs/loader/config_io.h"
#include "launcher/bench/other_load.h"
#include "launcher/commands.h"
#include "launcher/measure/machine_speed.h"
#include "launcher/measure/report.h"
#include "launcher/measure/synthetic_training.h"
#include "launcher/processes/ranks.h"
#include "runtime/run_checks.h"
#include "runtime/step_graph.h"
#include "runtime/tasks/task.h"

namespace birkhoff {
namespace {

// Limits the fp64 check of the first step, which runs on the CPU, to a second or so.
constexpr double kMaxCheckedFlops = 3e11;

struct Gradients {
  double nats = 0;
  std::vector<at::Tensor> values;  // copies, in the parameters' order
};

Gradients gradients_of(SyntheticTraining& training, std::int64_t num_sequences) {
  Gradients gradients;
  gradients.nats = training.gradients_of_first(num_sequences);
  for (const Parameter& parameter : training.model().parameters().list()) {
    gradients.values.push_back(parameter.value.grad().div(training.loss_scale()).cpu());
  }
  return gradients;
}

// The same model with the same parameters in fp64, on the CPU.
Gradients exact_gradients(configs::Config config, std::int64_t vocabulary, Model& model,
                          std::int64_t num_sequences) {
  config.mutable_train()->set_precision(configs::Train::fp64);
  SyntheticTraining exact(config, vocabulary, at::kCPU);
  {
    const c10::AutoGradMode no_gradients(false);
    const auto& to = exact.model().parameters().list();
    for (std::size_t i = 0; i < to.size(); ++i) {
      to[i].value.copy_(model.parameters().list()[i].value);
    }
  }
  return gradients_of(exact, num_sequences);
}

struct Errors {
  double loss = 0, gradients = 0;
};

// Relative errors of the loss and of the worst gradient. A gradient's error is the norm of the
// difference over its norm, or over a thousandth of the norm of all gradients if that is larger: a
// negligible gradient need not be exact.
Errors errors_of(const Gradients& gradients, const Gradients& exact) {
  const auto norm = [](const at::Tensor& tensor) { return tensor.norm().item<double>(); };
  double squares = 0;
  for (const at::Tensor& value : exact.values) squares += norm(value) * norm(value);
  Errors errors{std::abs(gradients.nats - exact.nats) / exact.nats, 0};
  for (std::size_t i = 0; i < exact.values.size(); ++i) {
    const at::Tensor difference = gradients.values[i].to(at::kDouble) - exact.values[i];
    const double scale = std::max(norm(exact.values[i]), 1e-3 * std::sqrt(squares));
    const double error = norm(difference) / scale;
    if (std::isnan(error) || error > errors.gradients) errors.gradients = error;
  }
  return errors;
}

Errors bounds_of(configs::Train::Precision precision) {
  switch (precision) {
    case configs::Train::fp32:
      return {1e-6, 1e-4};
    case configs::Train::fp64:
      return {0, 0};
    case configs::Train::bf16:
      return {0x1p-8, 0.05};
    case configs::Train::fp16:
      return {0x1p-11, 0.02};
  }
  require(false, "train.precision has a value outside its enum");
  return {};
}

// Checks that the first step is within its error bounds and repeats bit by bit; returns a line
// about it.
std::string check_first_step(const configs::Config& config, std::int64_t vocabulary,
                             SyntheticTraining& training) {
  const double most = kMaxCheckedFlops / (3 * training.model().forward_flops_per_sequence());
  const auto num_sequences = static_cast<std::int64_t>(
      std::clamp(most, 1.0, static_cast<double>(config.train().global_batch())));
  const Gradients first = gradients_of(training, num_sequences),
                  again = gradients_of(training, num_sequences);
  const bool same = first.nats == again.nats &&
                    std::equal(first.values.begin(), first.values.end(), again.values.begin(),
                               [](const at::Tensor& a, const at::Tensor& b) { return a.equal(b); });
  if (!same) {
    fail(ExitCode::kInternal, "the first step has different bits when repeated: loss {} and {}",
         first.nats, again.nats);
  }
  const Errors errors =
      errors_of(first, exact_gradients(config, vocabulary, training.model(), num_sequences));
  Errors bounds = bounds_of(config.train().precision());
  std::string gradient_bound = fmt::format("bound {:.2e}", bounds.gradients);
  if (config.train().precision() != configs::Train::fp64 && training.is_discontinuous()) {
    bounds.gradients = std::numeric_limits<double>::max();
    gradient_bound = "no bound, because rounded scores may choose other keys or points";
  }
  const std::string line = fmt::format(
      "First step ({} of {} sequences) in {} against fp64: relative error {:.2e} of the loss "
      "(bound {:.2e}), at most {:.2e} of a gradient ({}); the same bits when repeated.",
      num_sequences, config.train().global_batch(),
      configs::Train::Precision_Name(config.train().precision()), errors.loss, bounds.loss,
      errors.gradients, gradient_bound);
  if (!(errors.loss <= bounds.loss && errors.gradients <= bounds.gradients)) {
    fail(ExitCode::kInternal, "out of bounds: {}", line);
  }
  return line;
}

// FLOP/s of dense 16-bit products in NVIDIA's data sheets, by a part of the GPU's name; 0 if
// unknown.
double data_sheet_flops(at::Device device, at::ScalarType dtype) {
  if (!device.is_cuda() || (dtype != at::kBFloat16 && dtype != at::kHalf)) return 0;
  const std::string name = device_name(device);
  for (const auto& [part, teraflops] :
       {std::pair("NVL", 835.5), std::pair("H100 PCIe", 756.5), std::pair("H100", 989.5),
        std::pair("H200", 989.5), std::pair("A100", 312.0)}) {
    if (name.find(part) != std::string::npos) return teraflops * 1e12;
  }
  return 0;
}

std::string measured_table(SyntheticTraining& training, const configs::Config& config, int steps) {
  const at::ScalarType dtype = training.model().parameters().compute_dtype();
  const Stopwatch watch(training.device());
  ProductSpeed products(dtype, training.device());
  const bool graph = config.train().cuda_graph();
  constexpr int kWarmUp = StepGraph::kWarmUpRuns + 1;
  std::vector<double> forward, backward, optimizer, whole, replayed;
  OtherLoad other_load;
  other_load.begin();
  for (int i = -kWarmUp; i < steps; ++i) {
    const PartTimes times = training.timed_parts();
    const double step = training.step_seconds(/*recorded=*/false);
    const double replay = graph ? training.step_seconds(/*recorded=*/true) : 0;
    products.measure(watch);
    if (i < 0) continue;
    forward.push_back(times.forward);
    backward.push_back(times.backward);
    optimizer.push_back(times.optimizer);
    whole.push_back(step);
    replayed.push_back(replay);
  }
  other_load.end();
  const double batch_size = config.train().global_batch();
  const std::int64_t tokens_of_sequence = tokens_per_sample(config);
  const double tokens = batch_size * static_cast<double>(tokens_of_sequence);
  const double forward_flops = training.model().forward_flops_per_sequence() * batch_size;
  const double speed = products.flops_per_second();
  const double promised = data_sheet_flops(training.device(), dtype);
  const auto row = [&](const char* part, const std::vector<double>& seconds, double flops) {
    const double time = median(seconds);
    return table_row({part, figure(time * 1e3), figure(tokens / time), figure(flops / time / 1e9),
                      figure(flops / speed * 1e3), figure(flops / speed / time),
                      promised > 0 ? figure(flops / promised / time) : ""});
  };
  return fmt::format(
             "Medians of {} steps of {} sequences of {} tokens; the host waits for the device "
             "after each part, but not inside a step. Floor: the model's FLOPs (backward: twice "
             "the forward pass; none for embedding lookups) at the speed of {}, measured between "
             "the steps{}.\n\n",
             steps, config.train().global_batch(), tokens_of_sequence, products.text(),
             promised > 0 ? fmt::format("; the data sheet promises {:.4g} TFLOP/s", promised / 1e12)
                          : "") +
         table_head({"part", "ms", "tokens/s", "model GFLOP/s", "floor, ms", "floor / time",
                     "of the data sheet"}) +
         row("forward", forward, forward_flops) + row("backward", backward, 2 * forward_flops) +
         table_row({"optimizer", figure(median(optimizer) * 1e3), "", "", "", "", ""}) +
         row("step", whole, 3 * forward_flops) +
         (graph ? row("step, recorded", replayed, 3 * forward_flops) : "") + other_load.note();
}

struct OpenOperation : at::ObserverContext {
  std::string name;
  double start = 0, children = 0;
};

struct SelfTime {
  double seconds = 0;
  int calls = 0;
};

// LibTorch's callbacks are plain functions, so an object cannot hold their results.
thread_local std::vector<OpenOperation*> open_operations;
thread_local std::map<std::string, SelfTime> self_times;

std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& function) {
  auto operation = std::make_unique<OpenOperation>();
  operation->name = function.name();
  operation->start = clock_seconds();
  open_operations.push_back(operation.get());
  return operation;
}

void leave(const at::RecordFunction&, at::ObserverContext* context) {
  const auto* operation = static_cast<OpenOperation*>(context);
  const double seconds = clock_seconds() - operation->start;
  open_operations.pop_back();
  if (!open_operations.empty()) open_operations.back()->children += seconds;
  SelfTime& time = self_times[operation->name];
  time.seconds += seconds - operation->children;
  ++time.calls;
}

// Runs `work` a few times and returns a Markdown table of LibTorch's operations: self time (without
// the operations that an operation calls) and calls per run, the most expensive first. Our kernels
// that are not operations of LibTorch's dispatcher count toward their caller. Sees only the calling
// thread, so no operations on a GPU.
std::string operation_profile(const std::function<void()>& work) {
  constexpr int kRuns = 10;
  constexpr std::size_t kMaxRows = 16;
  self_times.clear();
  const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(enter, leave));
  for (int i = 0; i < kRuns; ++i) work();
  at::removeCallback(handle);
  std::vector<std::pair<std::string, SelfTime>> rows(self_times.begin(), self_times.end());
  std::sort(rows.begin(), rows.end(),
            [](const auto& a, const auto& b) { return a.second.seconds > b.second.seconds; });
  rows.resize(std::min(rows.size(), kMaxRows));
  std::string table = table_head({"operation", "self time, ms", "calls"});
  for (const auto& [name, time] : rows) {
    table +=
        table_row({name, figure(time.seconds / kRuns * 1e3), std::to_string(time.calls / kRuns)});
  }
  return table;
}

}  // namespace

int bench_step_command(const BenchStepArguments& arguments, std::ostream& out) {
  compute_on_cpu(threads_of_rank(usable_cores()));
  const configs::Config config = load_config(arguments.config, arguments.settings);
  if (config.mesh().tensor() > 1) {
    fail(ExitCode::kConfig,
         "mesh.tensor: {}: a step is timed in one process, on a whole model; add --set "
         "mesh.tensor=1",
         config.mesh().tensor());
  }
  const at::Device device = config.device() == configs::Config::cuda ? cuda_device(/*local_rank=*/0)
                                                                     : at::Device(at::kCPU);
  if (config.train().invariant().shards() > 0) {
    fail(ExitCode::kConfig,
         "train.invariant.shards is {}, but bench step measures steps without virtual shards: add "
         "--set train.invariant.shards=0",
         config.train().invariant().shards());
  }
  const std::int64_t vocabulary = synthetic_vocabulary(config, arguments.vocabulary);
  SyntheticTraining training(config, vocabulary, device);
  out << report_title(arguments.line, device) << '\n'
      << check_first_step(config, vocabulary, training) << ' '
      << measured_table(training, config, arguments.steps);
  const std::unique_ptr<Task> task = make_task(config);
  for (const std::string& line : slow_attention_paths(
           config, task->inputs(vocabulary), task->synthetic_batch(vocabulary, at::kMeta))) {
    out << "\nAttention: " << line << ".\n";
  }
  if (const std::string slow = warning_of_precision(config); !slow.empty()) {
    out << "\nWarning: " << slow << ".\n";
  }
  if (arguments.profile) out << '\n' << operation_profile([&] { training.timed_parts(); });
  return 0;
}

}  // namespace birkhoff
