// Only attention, in one process: compares each mechanism with LibTorch's operations for the same
// mechanism and with dense attention by LibTorch's own kernels.
#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iterator>
#include <list>
#include <map>
#include <ostream>

#include "cluster/base/cpu.h"
#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "cluster/base/gpu/device.h"
#include "configs/loader/text_parser.h"
#include "launcher/bench/attention_comparison.h"
#include "launcher/bench/other_load.h"
#include "launcher/commands.h"
#include "launcher/measure/machine_speed.h"
#include "launcher/measure/peak_memory.h"
#include "launcher/measure/report.h"
#include "launcher/processes/ranks.h"
#include "runtime/reporting/plot.h"
#include "runtime/step_graph.h"

namespace birkhoff {
namespace {

// If every query attends to every key, only the beginning is checked, because fp64 keeps all their
// scores.
constexpr std::int64_t kMaxCheckedTokens = 2048;
// With --recorded, the last of these runs records.
constexpr int kWarmUp = StepGraph::kWarmUpRuns + 1;

at::ScalarType dtype_named(const std::string& name) {
  if (name == "fp64") return at::kDouble;
  if (name == "fp32") return at::kFloat;
  return name == "bf16" ? at::kBFloat16 : at::kHalf;
}

// Parses a field of the oneof in configs/schema/attention.proto, with or without a body.
configs::Mechanism mechanism_of(const std::string& text) {
  const bool bare = text.find('{') == std::string::npos;
  configs::Mechanism config;
  if (const auto error = parse_text(bare ? text + "{}" : text, config)) {
    fail(ExitCode::kConfig, "MECHANISM '{}': {}{}{}", text, error->path,
         error->path.empty() ? "" : ": ", error->what);
  }
  return config;
}

// One candidate at one length: its inputs and its results.
struct Entry {
  Candidate candidate;
  const AttentionProblem* task;
  std::vector<at::Tensor> leaves;
  double forward_flops, error;
  bool library_dense;  // LibTorch's dense attention
  StepGraph forward_graph, both_graph;
  std::vector<double> forward, both;  // seconds
  std::size_t extra_bytes = 0;
};

class Comparison {
 public:
  Comparison(const BenchAttentionArguments& arguments, at::Device device)
      : arguments_(arguments),
        dtype_(dtype_named(arguments.dtype)),
        device_(device),
        watch_(device),
        machine_(dtype_, device),
        memory_(device) {}

  // Checks and measures one mechanism at one length; returns its rows.
  std::string run(const std::string& text, std::int64_t length) {
    const AttentionShape shape{arguments_.batch, arguments_.heads, length, arguments_.head_dim,
                               !arguments_.encoder};
    const configs::Mechanism config = mechanism_of(text);
    BuiltMechanism mechanism(config, shape, dtype_, device_);
    const AttentionProblem task =
        AttentionProblem::random(shape, mechanism->traits(), dtype_, device_);

    std::list<Entry> entries;
    std::vector<Candidate> ours{{"birkhoff", [&](const AttentionInput& in) {
                                   return mechanism->attend(in, Path::kFused).out_BHLD;
                                 }}};
    if (!config.has_dense()) {  // whose composition is just LibTorch's dense attention
      ours.push_back({"LibTorch, composed", [&](const AttentionInput& in) {
                        return mechanism->attend(in, Path::kSdpa).out_BHLD;
                      }});
    }
    if (fits_eager(*mechanism, task)) {
      ours.push_back({"LibTorch, eager", [&](const AttentionInput& in) {
                        return mechanism->attend(in, Path::kReference).out_BHLD;
                      }});
    }
    add_checked(ours, /*library_dense=*/false, config, mechanism, task, entries);

    configs::Mechanism dense_config;
    dense_config.mutable_dense();
    BuiltMechanism dense(dense_config, shape, dtype_, device_);
    const AttentionProblem dense_task =
        AttentionProblem::random(shape, MechanismTraits{}, dtype_, device_);
    add_checked(dense_candidates(shape.causal, device_), /*library_dense=*/true, dense_config,
                dense, dense_task, entries);
    measure(entries);
    note_paths(text, *mechanism, task);
    return rows(text, length, entries);
  }

  const MachineSpeed& machine() const { return machine_; }
  // Notes on omitted candidates, and on other load of the machine.
  std::string notes() const { return (notes_.empty() ? "" : "\n" + notes_) + other_load_.note(); }
  std::vector<PlotLine> plot_lines() const {
    std::vector<PlotLine> result;
    for (const auto& [name, line] : lines_) {
      result.push_back(line);
      result.back().colour = static_cast<int>(result.size()) - 1;
    }
    return result;
  }

 private:
  // Whether the scores of every query and key fit in memory, if the eager candidate computes them.
  bool fits_eager(const Mechanism& mechanism, const AttentionProblem& task) {
    const std::int64_t length = task.in.q_BHLD.size(2);
    const double gigabytes = static_cast<double>(task.in.q_BHLD.nbytes()) / 1e9 *
                             static_cast<double>(length) / static_cast<double>(arguments_.head_dim);
    if (!mechanism.traits().quadratic || gigabytes < (device_.is_cuda() ? 8 : 1)) return true;
    note("LibTorch, eager", length, fmt::format("its scores take {:.3g} GB", gigabytes));
    return false;
  }

  // Checks and adds `candidates`, except LibTorch's kernels that do not take this dtype or shape or
  // are too inexact.
  void add_checked(const std::vector<Candidate>& candidates, bool library_dense,
                   const configs::Mechanism& config, const BuiltMechanism& mechanism,
                   const AttentionProblem& task, std::list<Entry>& entries) {
    const std::int64_t length = task.in.q_BHLD.size(2);
    const AttentionProblem part = task.beginning(
        mechanism->traits().quadratic ? std::min(length, kMaxCheckedTokens) : length);
    const AttentionProblem exact_part = part.exact();
    BuiltMechanism exact_mechanism(
        config, {1, arguments_.heads, length, arguments_.head_dim, !arguments_.encoder},
        at::kDouble, at::kCPU);
    exact_mechanism.copy_parameters(mechanism);
    const auto with_parameters = [](std::vector<at::Tensor> leaves, const BuiltMechanism& built) {
      for (const Parameter& each : built.parameters().list()) leaves.push_back(each.value);
      return leaves;
    };
    const std::vector<at::Tensor> exact =
        solve({"",
               [&](const AttentionInput& in) {
                 return exact_mechanism->attend(in, Path::kReference).out_BHLD;
               }},
              exact_part, with_parameters(exact_part.leaves(), exact_mechanism));
    for (const Candidate& candidate : candidates) {
      double error = 0;
      try {
        error = error_of(solve(candidate, part, with_parameters(part.leaves(), mechanism)), exact);
      } catch (const c10::Error& problem) {
        if (candidate.is_ours()) throw;
        note(candidate.name, length, problem.what_without_backtrace());
        continue;
      }
      if (!(error <= error_bound(dtype_))) {
        const std::string what = fmt::format("relative error {:.2e} against fp64, more than {:.2e}",
                                             error, error_bound(dtype_));
        if (candidate.is_ours()) fail(ExitCode::kInternal, "L = {}: {}", length, what);
        note(candidate.name, length, what);
        continue;
      }
      entries.push_back({candidate,
                         &task,
                         with_parameters(task.leaves(), mechanism),
                         mechanism->forward_flops(length) * static_cast<double>(arguments_.batch),
                         error,
                         library_dense,
                         StepGraph(arguments_.recorded, device_),
                         StepGraph(arguments_.recorded, device_),
                         {},
                         {}});
    }
  }

  void measure(std::list<Entry>& entries) {
    other_load_.begin();
    for (int round = -kWarmUp; round < arguments_.rounds; ++round) {
      // Erased at once (list::remove_if would at its end), because the next candidate may need the
      // memory of its graphs.
      for (auto entry = entries.begin(); entry != entries.end();) {
        entry = measure(*entry, round) ? std::next(entry) : entries.erase(entry);
      }
      machine_.measure(watch_);
    }
    other_load_.end();
  }

  // Returns false if the candidate cannot be recorded.
  bool measure(Entry& entry, int round) {
    try {
      const double forward = watch_.seconds(
          [&] { entry.forward_graph.run([&] { attend(entry.candidate, *entry.task); }); });
      memory_.restart();
      const double both = watch_.seconds([&] {
        entry.both_graph.run([&] { solve(entry.candidate, *entry.task, entry.leaves); });
      });
      // A recording already has its memory.
      if (round < -1 || !arguments_.recorded) entry.extra_bytes = memory_.extra_bytes();
      if (round < 0) return true;
      entry.forward.push_back(forward);
      entry.both.push_back(both);
      return true;
    } catch (const Error& problem) {
      if (entry.candidate.is_ours() || round != -1) throw;
      note(entry.candidate.name, entry.task->in.q_BHLD.size(2), problem.what());
      return false;
    }
  }

  // Bytes: q, k, v and the output once each; backward reads those and the output's gradient and
  // writes three. FLOPs: backward recomputes scores and probabilities and computes four more
  // products.
  std::string rows(const std::string& text, std::int64_t length, const std::list<Entry>& entries) {
    double dense_seconds = INFINITY;
    for (const Entry& entry : entries) {
      if (entry.library_dense) dense_seconds = std::min(dense_seconds, median(entry.both));
    }
    std::string result;
    for (const Entry& entry : entries) {
      const double forward = median(entry.forward), both = median(entry.both);
      const double bytes = 4 * static_cast<double>(entry.task->in.q_BHLD.nbytes());
      const double forward_floor = machine_.floor_seconds(entry.forward_flops, bytes);
      const double both_floor = machine_.floor_seconds(3.5 * entry.forward_flops, 3 * bytes);
      result +=
          table_row({text, fmt::format("{}", length), entry.candidate.name, figure(forward * 1e3),
                     figure(forward_floor * 1e3), figure(forward_floor / forward),
                     figure(both * 1e3), figure(both_floor * 1e3), figure(both_floor / both),
                     std::isfinite(dense_seconds) ? figure(dense_seconds / both) : "",
                     figure(static_cast<double>(entry.extra_bytes) / (1 << 20)),
                     fmt::format("{:.1e}", entry.error)});
      add_point(text + ": " + entry.candidate.name, length, both, false);
      if (entry.candidate.is_ours()) add_point(text + ": floor", length, both_floor, true);
    }
    return result;
  }

  void add_point(const std::string& name, std::int64_t length, double seconds, bool dashed) {
    PlotLine& line = lines_[name];
    line.name = name;
    line.marked = true;
    line.dashed = dashed;
    line.points.emplace_back(static_cast<double>(length), seconds * 1e3);
  }

  void note_paths(const std::string& text, const Mechanism& mechanism,
                  const AttentionProblem& task) {
    const at::NoGradGuard no_gradients;
    const PathRecord record;
    mechanism.attend(task.in, Path::kFused);
    for (const PathTaken& taken : record.taken()) {
      if (taken.why.empty()) continue;
      notes_ += fmt::format("{} at L = {}: {}.\n", text, task.in.q_BHLD.size(2), describe(taken));
    }
  }

  void note(const std::string& name, std::int64_t length, const std::string& why) {
    notes_ +=
        fmt::format("Left out: {} at L = {}: {}.\n", name, length, why.substr(0, why.find('\n')));
  }

  const BenchAttentionArguments& arguments_;
  const at::ScalarType dtype_;
  const at::Device device_;
  const Stopwatch watch_;
  MachineSpeed machine_;
  PeakMemory memory_;
  OtherLoad other_load_;
  std::string notes_;
  std::map<std::string, PlotLine> lines_;
};

}  // namespace

int bench_attention_command(const BenchAttentionArguments& arguments, std::ostream& out) {
  const int threads = threads_of_rank(usable_cores());
  if (arguments.library_defaults) {
    at::set_num_threads(threads);
  } else {
    compute_on_cpu(threads);
  }
  for (const std::string& text : arguments.mechanisms) mechanism_of(text);
  if (arguments.recorded && arguments.device != "cuda") {
    fail(ExitCode::kUsage,
         "--recorded launches CUDA graphs: add --device cuda, or leave --recorded out");
  }
  const at::Device device =
      arguments.device == "cuda" ? cuda_device(/*local_rank=*/0) : at::Device(at::kCPU);
  // Find out before the measurement whether a file can be written.
  for (const std::string& file : {arguments.svg, arguments.table}) {
    if (!file.empty() && !std::filesystem::exists(file)) write_file_durably(file, "");
  }
  Comparison comparison(arguments, device);
  std::string rows;
  for (const std::string& text : arguments.mechanisms) {
    for (const std::int64_t length : arguments.lengths) rows += comparison.run(text, length);
  }
  const std::string sizes =
      fmt::format("B = {}, H = {}, D = {}, {}, {}", arguments.batch, arguments.heads,
                  arguments.head_dim, arguments.dtype, arguments.encoder ? "not causal" : "causal");
  const std::string report = fmt::format(
      "{}\n{}: medians of {} rounds, {}. Floor: q, k, v and the output moved once, backward twice "
      "that, and the mechanism's FLOPs, backward 2.5 times those, at the speed of {}, measured "
      "between the rounds. Error: the largest of the output and all gradients against fp64 (bound "
      "{:.0e}). Dense: LibTorch's fastest. Extra MiB: peak memory of the tensors of forward and "
      "backward in addition to their inputs, without our threads' scratch.\n\n{}{}{}",
      report_title(arguments.line, device), sizes, arguments.rounds,
      !device.is_cuda()    ? "caches warm"
      : arguments.recorded ? "each after the L2 cache was flushed, launched as CUDA graphs"
                           : "each after the L2 cache was flushed",
      comparison.machine().text(), error_bound(dtype_named(arguments.dtype)),
      table_head({"mechanism", "L", "by", "forward, ms", "floor, ms", "floor / time",
                  "forward + backward, ms", "floor, ms", "floor / time", "dense / time",
                  "extra MiB", "error"}),
      rows, comparison.notes());
  out << report;
  if (!arguments.table.empty()) write_file_durably(arguments.table, report);
  if (!arguments.svg.empty()) {
    write_file_durably(arguments.svg, plot_svg({"Attention, forward + backward: " + sizes,
                                                {"L", AxisScale::kLog2},
                                                {"ms", AxisScale::kLog10},
                                                comparison.plot_lines()}));
  }
  return 0;
}

}  // namespace birkhoff
