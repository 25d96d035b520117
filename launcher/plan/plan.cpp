#include "launcher/plan/plan.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>

#include "cluster/base/cpu.h"
#include "configs/loader/check.h"
#include "configs/schema/options.pb.h"
#include "data/batch/partition.h"
#include "launcher/measure/synthetic_training.h"
#include "launcher/plan/rank_state.h"
#include "launcher/plan/trial.h"
#include "runtime/tasks/task.h"

namespace birkhoff {
namespace {

constexpr double kMega = 1e6, kGiga = 1e9;
constexpr int kPlanRounds = 7;

// The part of a model that a parameter belongs to, by its name.
const char* part_of(const std::string& parameter) {
  const auto names = [&](const char* word) { return parameter.find(word) != std::string::npos; };
  if (names("_norm")) return "norms";
  if (names("attention.")) return "attention";
  if (names("feed_forward.")) return "feed-forward";
  if (parameter.starts_with("output.")) return "head";
  return "embedding";
}

bool optimizer_has_slices(const configs::Optimizer& optimizer) {
  const auto* kind = optimizer.GetReflection()->GetOneofFieldDescriptor(
      optimizer, optimizer.GetDescriptor()->oneof_decl(0));
  return kind != nullptr && kind->message_type()->options().GetExtension(configs::slices);
}

std::int64_t batch_bytes(const configs::Config& config, std::int64_t rows) {
  configs::Config one = config;
  one.mutable_train()->set_global_batch(1);
  const Batch batch = make_task(one)->synthetic_batch(/*vocabulary=*/2, at::kCPU);
  std::vector<at::Tensor> tensors = {batch.sample_ids_B};
  for (const auto& [name, tensor] : batch.fields) {
    if (name != field::kPast) tensors.push_back(tensor);
  }
  std::int64_t bytes = memory_bytes(tensors);
  if (config.data().restart_at_documents()) bytes += 12L * config.data().sequence_length();
  return rows * bytes;
}

class Planner {
 public:
  explicit Planner(const PlanRequest& request)
      : request_(request),
        config_(request.config),
        model_(make_model(config_, request.vocabulary, at::kMeta)),
        state_(rank_state(config_, request.vocabulary, request.ranks)),
        exchanges_(exchanges_of(state_.schedule, mesh_shape(config_, request.ranks),
                                request.ranks_per_node)),
        saved_(saved_state(config_, request.vocabulary, request.ranks)) {
    const configs::Train& train = config_.train();
    const int data_ranks = request.ranks / config_.mesh().tensor();
    for (int rank = 0; rank < data_ranks; ++rank) {
      rows_ = std::max(
          rows_,
          rank_share(train.global_batch(), train.invariant().shards(), rank, data_ranks).size());
    }
    micro_batch_ =
        train.micro_batch() > 0 ? std::min<std::int64_t>(train.micro_batch(), rows_) : rows_;
    configs::Config of_rank = config_;
    of_rank.mutable_train()->set_global_batch(static_cast<int>(rows_));
    const std::unique_ptr<Task> task = make_task(of_rank);
    slow_paths_ = slow_attention_paths(config_, task->inputs(request.vocabulary),
                                       task->synthetic_batch(request.vocabulary, at::kMeta));
  }

  Plan plan() {
    for (const std::string& line : slow_paths_) note("Attention: {}.", line);
    add_parameters();
    run_trials();
    add_memory();
    add_computation();
    add_communication();
    add_checkpoint();
    if (request_.measure && times_) add_machine();
    add_time();
    add_effective_time();
    return std::move(plan_);
  }

 private:
  template <typename... Args>
  void note(fmt::format_string<Args...> format, Args&&... args) {
    plan_.notes.push_back(fmt::format(format, std::forward<Args>(args)...));
  }

  double forward_flops() const {
    return model_->forward_flops_per_sequence() * static_cast<double>(rows_) /
           config_.mesh().tensor();
  }
  double backward_flops() const {
    return 2 * forward_flops() + (config_.train().recompute() ? layers_flops_ : 0);
  }
  double micro_batches() const {
    return static_cast<double>(rows_) / static_cast<double>(micro_batch_);
  }

  RankState state_with(int zero_stage) const {
    configs::Config config = config_;
    config.mutable_train()->set_zero_stage(zero_stage);
    return rank_state(config, request_.vocabulary, request_.ranks, WithSchedule::kNo);
  }

  void add_parameters() {
    PlanTable table{"parameters", "Parameters of the model.", {{"elements", "elements"}}, {}};
    std::map<std::string, std::int64_t> elements;
    for (const Parameter& parameter : model_->parameters().list()) {
      elements[part_of(parameter.name)] += parameter.value.numel();
    }
    for (const char* part : {"embedding", "attention", "feed-forward", "norms", "head"}) {
      table.add(part, {static_cast<double>(elements[part])});
    }
    table.add("total", {static_cast<double>(model_->parameters().num_elements())});
    std::int64_t statistics = 0;
    for (const Statistic& each : model_->parameters().statistics()) {
      statistics += each.value.numel();
    }
    if (statistics > 0) table.add("state without gradients", {static_cast<double>(statistics)});
    plan_.tables.push_back(std::move(table));
  }

  bool may_recompute() const { return !has_batch_norm(config_.task()); }

  void run_trials() {
    Trial trial(config_, request_.vocabulary, micro_batch_);
    layers_flops_ = trial.layers_flops_per_sequence() * static_cast<double>(rows_);
    const bool recompute = config_.train().recompute();
    if (may_recompute()) memory_[!recompute] = trial.memory(!recompute);
    memory_[recompute] = trial.memory(recompute);
    if (!trial.layers_fit()) {
      note(
          "Activations of the layers are estimated for usual layers and may be off by half: "
          "two layers need more than the 1 GB that a plan takes.");
    } else if (!trial.tried().empty()) {
      note("Memory is extrapolated from trials of up to {}.", trial.tried());
    }
    if (!request_.measure || !trial.layers_fit()) return;
    const int others =
        std::clamp(usable_cores() / at::get_num_threads() - 1, 0, request_.ranks_per_node - 1);
    times_ = trial.times(kPlanRounds, others);
    if (!trial.tried().empty()) {
      note("Times are extrapolated by FLOPs from steps of {}.", trial.tried());
    }
    if (times_->neighbours < others) {
      note("Measured next to {} of {} other ranks: the memory of a plan holds no more.",
           times_->neighbours, others);
    }
  }

  void add_memory() {
    const configs::Train& train = config_.train();
    PlanTable table{
        "memory",
        fmt::format("Memory of a rank at its peak, in LibTorch's tensors and in buffers "
                    "of the communication; micro-batches of {} of {} sequences.",
                    micro_batch_, rows_),
        {},
        {}};
    struct Variant {
      RankState state;
      bool recompute;
    };
    std::vector<Variant> variants = {{state_, train.recompute()}};
    table.columns = {{"configured", "MB as configured", kMega}};
    if (may_recompute()) {
      variants.push_back({state_, !train.recompute()});
      table.columns.push_back({train.recompute() ? "without_recompute" : "with_recompute",
                               train.recompute() ? "without recompute" : "with recompute", kMega});
    }
    if (request_.ranks > 1 && optimizer_has_slices(train.optimizer())) {
      variants.push_back({state_with(train.zero_stage() > 0 ? 0 : 1), train.recompute()});
      table.columns.push_back({train.zero_stage() > 0 ? "without_zero" : "with_zero",
                               train.zero_stage() > 0 ? "without ZeRO" : "with ZeRO", kMega});
    }
    const auto copy = static_cast<double>(saved_.copy_bytes);
    // The batches in the queue, the one being trained on, and the one being filled.
    const double batches =
        static_cast<double>(batch_bytes(config_, rows_) * (config_.data().prefetch() + 2));
    // What a model with a memory carries, and what the passes of a step leave for the next one.
    std::int64_t past = 2 * rows_;
    for (const std::int64_t size : model_->past_shape()) past *= size;
    const double memory =
        model_->past_shape().empty()
            ? 0
            : static_cast<double>(
                  past * static_cast<std::int64_t>(c10::elementSize(model_->parameters().dtype())));
    std::vector<double> totals(variants.size(), 0);
    const auto add = [&](const char* part, const auto& value) {
      std::vector<std::optional<double>> values;
      for (std::size_t i = 0; i < variants.size(); ++i) {
        values.push_back(value(variants[i].state, memory_[variants[i].recompute]));
        totals[i] += *values.back();
      }
      table.add(part, std::move(values));
    };
    using State = const RankState&;
    using Tensors = const TrialMemory&;
    add("values", [](State s, Tensors) { return static_cast<double>(s.values_bytes); });
    add("gradients", [](State s, Tensors) { return static_cast<double>(s.gradients_bytes); });
    add("values and gradients of a layer in use",
        [](State s, Tensors) { return static_cast<double>(s.passing_bytes); });
    add("optimizer state", [](State s, Tensors) { return static_cast<double>(s.optimizer_bytes); });
    add("activations of the layers", [](State, Tensors t) { return t.layers; });
    add("embedding and logits and loss", [](State, Tensors t) { return t.rest; });
    add("temporary in the backward pass", [](State, Tensors t) { return t.temporary; });
    add("evaluation beyond a step", [](State, Tensors t) {
      return std::max(0.0, t.evaluation - t.layers - t.rest - t.temporary);
    });
    add("batches", [&](State, Tensors) { return batches; });
    if (memory > 0) add("memory of past tokens", [&](State, Tensors) { return memory; });
    add("copy for a checkpoint", [&](State, Tensors) { return copy; });
    add("communication", [](State s, Tensors) { return static_cast<double>(s.exchange_bytes); });
    table.add("total", {totals.begin(), totals.end()});
    plan_.tables.push_back(std::move(table));
    if (config_.device() == configs::Config::cuda) {
      note("Activations are counted for the CPU's kernels: {}, and NCCL's buffers are not counted.",
           slow_paths_.empty() ? "a GPU's kernels keep less"
                               : "a GPU's kernels keep less, but where attention is not on our "
                                 "fastest kernels (above), it may keep the scores of all pairs");
    }
    if (train.invariant().shards() > 0) {
      note("The partial sums of train.invariant.shards are not counted in the memory.");
    }
  }

  void add_computation() {
    PlanTable table{"computation",
                    "Computation of a rank in a step. Bytes: each tensor that is kept, each value "
                    "and each moment once for each use, so real kernels move more.",
                    {{"flops", "GFLOP", kGiga}, {"bytes", "GB moved at least", kGiga}},
                    {}};
    const RankState whole = state_with(/*zero_stage=*/0);
    const auto values = static_cast<double>(whole.values_bytes);
    const auto gradients = static_cast<double>(whole.gradients_bytes);
    const TrialMemory& memory = memory_[config_.train().recompute()];
    const double kept = (memory.layers + memory.rest) * micro_batches();
    table.add("forward", {forward_flops(), values * micro_batches() + kept});
    table.add("backward", {backward_flops(), (values + 2 * gradients) * micro_batches() + kept});
    table.add("optimizer", {std::nullopt, 2 * static_cast<double>(state_.optimizer_bytes) +
                                              updated_share() * (2 * values + gradients)});
    table.add("step", {forward_flops() + backward_flops(), std::nullopt});
    plan_.tables.push_back(std::move(table));
  }

  // The share of the parameters that the rank updates: with slices, only its own.
  double updated_share() const {
    return static_cast<double>(state_.optimizer_bytes) /
           static_cast<double>(state_with(/*zero_stage=*/0).optimizer_bytes);
  }

  bool has_several_nodes() const { return request_.ranks > request_.ranks_per_node; }

  // Added to the purpose of an exchange that other groups have, too.
  std::string name_of_group(const Exchange& exchange) const {
    const auto same = [&](const Exchange& each) { return each.what == exchange.what; };
    if (std::ranges::count_if(exchanges_, same) < 2) return "";
    if (exchange.group == GroupKind::kAcrossNodes) return " between nodes";
    return exchange.group == GroupKind::kTensor ? " of a replica" : "";
  }

  void add_communication() {
    if (exchanges_.empty()) return;
    PlanTable table{"communication",
                    "Communication of a rank in a step. Inputs: as the process group counts them. "
                    "Sent: to other ranks, and of that to other nodes.",
                    {{"operations", "operations"},
                     {"bytes", "MB of inputs", kMega},
                     {"sent_bytes", "MB sent", kMega},
                     {"sent_to_other_nodes", "MB to other nodes", kMega}},
                    {}};
    Exchange total{.what = "total"};
    const auto add = [&](const Exchange& each) {
      table.add(each.what + name_of_group(each),
                {static_cast<double>(each.operations), static_cast<double>(each.bytes),
                 each.sent_bytes, each.sent_to_other_nodes});
    };
    for (const Exchange& each : exchanges_) {
      add(each);
      total.operations += each.operations;
      total.bytes += each.bytes;
      total.sent_bytes += each.sent_bytes;
      total.sent_to_other_nodes += each.sent_to_other_nodes;
    }
    add(total);
    plan_.tables.push_back(std::move(table));
  }

  void add_checkpoint() {
    const CheckpointSize& size = saved_.size;
    PlanTable table{"checkpoint",
                    fmt::format("A checkpoint on disk, without the tokenizer's file; a run keeps "
                                "{} (checkpoint.keep) and writes one more.",
                                config_.checkpoint().keep()),
                    {{"bytes", "MB", kMega}},
                    {}};
    table.add("tensors", {static_cast<double>(size.tensors)});
    table.add("descriptions", {static_cast<double>(size.descriptions)});
    table.add("total", {static_cast<double>(size.total())});
    plan_.tables.push_back(std::move(table));
  }

  void add_machine() {
    const double passes = (forward_flops() + backward_flops()) / micro_batches() /
                          (times_->step.forward + times_->step.backward);
    PlanTable table{
        "machine",
        fmt::format("This machine, measured just now with {} per rank.",
                    at::get_num_threads() == 1 ? "1 thread"
                                               : fmt::format("{} threads", at::get_num_threads())),
        {{"per_second", "G per second", kGiga}},
        {}};
    table.add("FLOP of matrix products", {times_->product_flops});
    table.add("FLOP of the passes", {passes});
    table.add("bytes copied", {times_->copy_bytes});
    plan_.tables.push_back(std::move(table));
  }

  void add_time() {
    if (!times_ && !request_.flops_per_second) {
      note("The time of a step is not predicted: give {}--peak-tflops.",
           request_.measure ? "" : "--measure, or ");
      return;
    }
    PlanTable table{"time",
                    times_ ? "Time of a step, from the measurements above."
                           : fmt::format("Time of a step at {:.4g} TFLOP/s a rank: a lower bound, "
                                         "without the optimizer and copies within a node.",
                                         *request_.flops_per_second / 1e12),
                    {{"seconds", "ms", 1e-3}},
                    {}};
    const double speed = request_.flops_per_second.value_or(1);
    const double forward =
        times_ ? times_->step.forward * micro_batches() : forward_flops() / speed;
    const double backward =
        times_ ? times_->step.backward * micro_batches() : backward_flops() / speed;
    StepSchedule schedule = state_.schedule;
    schedule.scale(StepPart::kForward, forward);
    schedule.scale(StepPart::kBackward, backward);
    double update = 0;
    if (times_) update = times_->step.optimizer * updated_share();
    schedule.scale(StepPart::kUpdate, update);
    const Link infinite{INFINITY};
    const SimulatedStep simulated =
        simulate(schedule, mesh_shape(config_, request_.ranks),
                 {request_.ranks_per_node, request_.node.value_or(infinite),
                  request_.network.value_or(infinite)});
    double step = simulated.seconds;
    table.add("forward", {forward});
    table.add("backward", {backward});
    if (times_) table.add("optimizer", {update});
    if (request_.ranks > 1 && times_ && config_.device() == configs::Config::cpu) {
      // A byte sent within a node is written to shared memory, read there, and added up: three
      // copies, which cores make that would compute.
      double local = 0;
      for (const Exchange& each : exchanges_) {
        local += 6 * (each.sent_bytes - each.sent_to_other_nodes) / times_->copy_bytes;
      }
      table.add("communication within a node", {local});
      step += local;
    }
    if ((has_several_nodes() && request_.network) || request_.node) {
      table.add("communication not hidden by computation", {simulated.exposed()});
    }
    if (has_several_nodes() && !request_.network) {
      note("The time of the network is not predicted: give --network-gbs.");
    }
    if (request_.ranks_per_node > 1 && !request_.node &&
        config_.device() == configs::Config::cuda) {
      note("The time of transfers inside a node is not predicted: give --node-gbs.");
    }
    table.add("step", {step});
    step_seconds_ = step;
    plan_.tables.push_back(std::move(table));
    PlanTable speeds{"speed", "Speed of the run.", {{"per_second", "per second"}}, {}};
    const double tokens =
        1.0 * config_.train().global_batch() * static_cast<double>(tokens_per_sample(config_));
    speeds.add("tokens", {tokens / step});
    speeds.add("steps", {1 / step});
    plan_.tables.push_back(std::move(speeds));
  }

  void add_effective_time() {
    if (!request_.faults) return;
    const FaultModel& faults = *request_.faults;
    const double best = best_interval_seconds(faults);
    const auto every = static_cast<double>(config_.checkpoint().every());
    std::vector<double> intervals;
    PlanTable table{
        "effective_time",
        fmt::format("Shares of a job's time at {:.4g} faults a day, {:.4g} s a save and "
                    "{:.4g} s a restart.",
                    faults.faults_per_day, faults.save_seconds, faults.restart_seconds),
        {},
        {}};
    if (step_seconds_ && every > 0) {
      table.columns.push_back({"configured", "as configured"});
      intervals.push_back(every * *step_seconds_);
    } else {
      note("The effective time of checkpoint.every is not predicted, because {} unknown.",
           every > 0 ? "the time of a step is" : "no interval is set: it is");
    }
    if (std::isfinite(best) && best > 0) {
      table.columns.push_back({"best", "best interval"});
      intervals.push_back(best);
    }
    const auto add = [&](const char* part, const auto& value) {
      std::vector<std::optional<double>> values;
      for (const double interval : intervals) values.push_back(value(interval));
      table.add(part, std::move(values));
    };
    add("seconds between saves", [](double interval) { return interval; });
    if (step_seconds_) {
      add("steps between saves", [&](double interval) { return interval / *step_seconds_; });
      add("steps lost per fault", [&](double interval) {
        return lost_seconds_per_fault(faults, interval) / *step_seconds_;
      });
    }
    const auto share = [&](double EffectiveTime::*part) {
      return [&faults, part](double interval) { return effective_time(faults, interval).*part; };
    };
    add("steps that count", share(&EffectiveTime::steps));
    add("saves", share(&EffectiveTime::saves));
    add("lost to faults", share(&EffectiveTime::lost));
    add("restarts", share(&EffectiveTime::restarts));
    plan_.tables.push_back(std::move(table));
  }

  const PlanRequest& request_;
  const configs::Config& config_;
  const std::unique_ptr<Model> model_;
  const RankState state_;                    // as configured
  const std::vector<Exchange> exchanges_;    // of a step
  const SavedState saved_;                   // as configured
  std::int64_t rows_ = 0, micro_batch_ = 0;  // sequences of the rank with the most
  std::vector<std::string> slow_paths_;      // of attention
  double layers_flops_ = 0;                  // of their forward pass, without embedding and head
  std::map<bool, TrialMemory> memory_;       // by train.recompute
  std::optional<TrialTimes> times_;          // as configured
  std::optional<double> step_seconds_;
  Plan plan_;
};

}  // namespace

Plan make_plan(const PlanRequest& request) { return Planner(request).plan(); }

double rank_memory(const Plan& plan) {
  const auto memory = std::ranges::find(plan.tables, "memory", &PlanTable::key);
  return *memory->rows.back().values.front();  // the total
}

}  // namespace birkhoff
