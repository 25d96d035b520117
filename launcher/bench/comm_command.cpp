#include <ATen/Parallel.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <memory>
#include <optional>
#include <ostream>
#include <string_view>
#include <vector>

#include "cluster/base/cpu.h"
#include "cluster/base/error.h"
#include "cluster/base/gpu/device.h"
#include "cluster/base/text/plural.h"
#include "cluster/mesh.h"
#include "configs/loader/config_io.h"
#include "launcher/bench/collectives.h"
#include "launcher/bench/other_load.h"
#include "launcher/bench/replay_command.h"
#include "launcher/commands.h"
#include "launcher/measure/report.h"
#include "launcher/measure/synthetic_training.h"
#include "launcher/processes/ranks.h"
#include "launcher/processes/supervisor.h"
#include "runtime/run_checks.h"
#ifdef BIRKHOFF_CUDA
#include "cluster/nccl_group.h"
#endif

namespace birkhoff {
namespace {

constexpr std::int64_t kElementBytes = 4;
constexpr std::int64_t kMaxBytes = std::int64_t{4} << 30;

// Parses a number of bytes: 4096, 4K or 64M; -1 if malformed.
std::int64_t parse_bytes(std::string_view text) {
  std::int64_t bytes = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), bytes);
  if (error != std::errc() || bytes < 0 || bytes > kMaxBytes) return -1;
  const std::string_view unit(end, static_cast<std::size_t>(text.data() + text.size() - end));
  if (unit.empty()) return bytes;
  const std::size_t power = std::string_view("KMG").find(unit);
  return unit.size() == 1 && power != std::string_view::npos ? bytes << 10 * (power + 1) : -1;
}

// MIN, 4 MIN, 16 MIN, ... up to MAX.
std::vector<std::int64_t> sizes_of(const std::string& range) {
  const std::size_t dash = std::min(range.find('-'), range.size());
  const std::string_view text = range;
  const std::int64_t least = parse_bytes(text.substr(0, dash));
  const std::int64_t most = dash < text.size() ? parse_bytes(text.substr(dash + 1)) : -1;
  if (least < kElementBytes || most < least || most > kMaxBytes) {
    fail(ExitCode::kUsage,
         "--bytes '{}': give MIN-MAX, for instance 4K-64M, with 4 <= MIN <= MAX <= 4G", range);
  }
  std::vector<std::int64_t> sizes;
  for (std::int64_t bytes = least; bytes <= most; bytes *= 4) sizes.push_back(bytes);
  return sizes;
}

// The measured group and its reference implementation.
struct CollectiveComparison {
  at::Device device = at::kCPU;
  NodeRanks ranks{.rank = 0, .size = 1, .node_ranks = 1};
  std::unique_ptr<ProcessGroup> group;
  RunCollective ours, peer;
  std::string peer_name;
};

CollectiveComparison make_comparison(World& world, const BenchCommArguments& arguments) {
  const int node_ranks = arguments.ranks_per_node.value_or(1);
  CollectiveComparison comparison;
  comparison.ranks = {.rank = world.rank(), .size = world.size(), .node_ranks = node_ranks};
#ifdef BIRKHOFF_CUDA
  if (arguments.device == "cuda") {
    comparison.device = cuda_device(world.local_rank());
    comparison.group = std::make_unique<NcclGroup>(world.group(), comparison.device, node_ranks);
    comparison.ours = group_collectives(*comparison.group);
    comparison.peer = nccl_collectives(world.group(), comparison.device);
    comparison.peer_name = "NCCL";
    return comparison;
  }
#endif
  comparison.group = world.split(/*color=*/0, world.rank(), node_ranks);
  comparison.ours = group_collectives(*comparison.group);
  comparison.peer = mpi_collectives();
  comparison.peer_name = "MPI";
  return comparison;
}

// Ours must have the bits of the sum in order. The peer chooses its own order.
void check_results(const CollectiveComparison& comparison, World& world, Collective what,
                   std::int64_t count) {
  const at::Tensor expected = expected_output(what, count, comparison.ranks);
  const auto result = [&](const RunCollective& run) {
    const CollectiveTensors host = make_tensors(what, count, world.rank(), world.size());
    const at::Tensor output = host.output.to(comparison.device);
    run(what, output, host.input.defined() ? host.input.to(comparison.device) : at::Tensor());
    return output.cpu();
  };
  if (const std::string wrong = first_difference(result(comparison.ours), expected);
      !wrong.empty()) {
    fail(ExitCode::kInternal, "{} of {} bytes on rank {} of {} is wrong: {}", collective_name(what),
         count * kElementBytes, world.rank(), world.size(), wrong);
  }
  if (!at::allclose(result(comparison.peer), expected, 1e-5, 1e-5)) {
    fail(ExitCode::kInternal, "{} of {} bytes by {} is wrong: it cannot serve as the reference",
         collective_name(what), count * kElementBytes, comparison.peer_name);
  }
}

struct Lane {
  std::function<void()> run;
  std::vector<double> seconds;  // of the slowest rank, one per round
};

// Measures rounds in which the lanes take turns. Collective.
void measure(World& world, at::Device device, int rounds, std::int64_t repetitions,
             std::vector<Lane>& lanes, OtherLoad& other_load) {
  other_load.begin();
  const auto num_lanes = static_cast<std::int64_t>(lanes.size());
  const at::Tensor seconds = at::empty({rounds, num_lanes}, at::kDouble);
  for (int round = 0; round < rounds; ++round) {
    for (std::int64_t turn = 0; turn < num_lanes; ++turn) {
      const std::int64_t lane = (round + turn) % num_lanes;
      const auto& run = lanes[static_cast<std::size_t>(lane)].run;
      world.group().barrier("bench");
      const double start = clock_seconds();
      for (std::int64_t i = 0; i < repetitions; ++i) run();
      synchronize(device);
      seconds[round][lane] = (clock_seconds() - start) / static_cast<double>(repetitions);
    }
  }
  other_load.end();
  world.group().all_reduce(seconds, ReduceOp::kMax, "bench");
  for (std::int64_t i = 0; i < seconds.numel(); ++i) {
    lanes[static_cast<std::size_t>(i % num_lanes)].seconds.push_back(
        seconds.const_data_ptr<double>()[i]);
  }
}

// The note on other load for all machines, without the load of the ranks. Collective.
std::string load_beside_all_ranks(World& world, const OtherLoad& other_load) {
  const ProcessorSeconds& here = other_load.counted();
  const double speaks = world.local_rank() == 0 ? 1 : 0;  // one rank per machine speaks
  const at::Tensor sums = at::tensor({here.own, speaks * here.all, speaks * here.busy,
                                      speaks * here.stolen, speaks * machine_cores()});
  world.group().all_reduce(sums, ReduceOp::kSum, "bench");
  const auto* sum = sums.const_data_ptr<double>();
  return other_load_note({.all = sum[1], .busy = sum[2], .stolen = sum[3], .own = sum[0]},
                         static_cast<int>(sum[4]));
}

// The ratio of the times of `other` and `ours`: the median over rounds.
double ratio(const Lane& other, const Lane& ours) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < ours.seconds.size(); ++i) {
    ratios.push_back(other.seconds[i] / ours.seconds[i]);
  }
  return median(ratios);
}

std::string measured_row(const CollectiveComparison& comparison, World& world, Collective what,
                         std::int64_t count, int rounds, OtherLoad& other_load) {
  constexpr std::int64_t kBytesOfASample = 1 << 20, kMaxRepetitions = 20;
  const std::int64_t bytes = count * kElementBytes;
  const double factor = bus_factor(what, world.size());
  const CollectiveTensors host = make_tensors(what, count, world.rank(), world.size());
  const at::Tensor output = host.output.to(comparison.device).zero_();  // sums of zeros stay finite
  const at::Tensor input = host.input.defined() ? host.input.to(comparison.device) : at::Tensor();

  std::vector<Lane> lanes;
  lanes.push_back({[&] { comparison.ours(what, output, input); }, {}});
  lanes.push_back({[&] { comparison.peer(what, output, input); }, {}});
  std::vector<char> from, to;
  if (!comparison.device.is_cuda()) {
    from.resize(static_cast<std::size_t>(factor * static_cast<double>(bytes)));
    to.resize(from.size());
    lanes.push_back({[&] { std::memcpy(to.data(), from.data(), from.size()); }, {}});
  }
  measure(world, comparison.device, rounds,
          std::clamp(kBytesOfASample / bytes, std::int64_t{1}, kMaxRepetitions), lanes, other_load);

  const double seconds = median(lanes[0].seconds);
  const double algbw = static_cast<double>(bytes) / seconds / 1e9;
  std::vector<std::string> cells = {collective_name(what), std::to_string(bytes),
                                    figure(seconds * 1e6), figure(algbw), figure(algbw * factor)};
  for (std::size_t other = lanes.size() - 1; other > 0; --other) {  // the floor, the peer
    cells.push_back(figure(median(lanes[other].seconds) * 1e6));
    cells.push_back(figure(ratio(lanes[other], lanes[0])));
  }
  return table_row(cells);
}

std::string heading(const CollectiveComparison& comparison, const BenchCommArguments& arguments,
                    int ranks) {
  const std::string& peer = comparison.peer_name;
  const bool host = !comparison.device.is_cuda();
  std::vector<std::string> columns = {"operation", "bytes", "time, us", "algbw, GB/s",
                                      "busbw, GB/s"};
  if (host) columns.insert(columns.end(), {"floor, us", "floor / time"});
  columns.insert(columns.end(), {peer + ", us", peer + " / time"});
  return report_title(arguments.line, comparison.device, ranks) +
         fmt::format(
             "\nEach result is first checked bit by bit against the sum in rank order{}. fp32; "
             "medians of {} interleaved rounds (also of ratios), of the slowest rank; bytes, algbw "
             "and busbw as nccl-tests defines them, GB = 10^9 bytes.{}\n\n",
             arguments.ranks_per_node
                 ? fmt::format(", inside nodes of {} first", *arguments.ranks_per_node)
                 : "",
             arguments.rounds,
             host ? " Floor: a memcpy on each rank of the bytes that busbw counts." : "") +
         table_head(columns);
}

int measure_in_world(World& world, const BenchCommArguments& arguments, const StopSignals& signals,
                     std::ostream& out, std::ostream& err) {
  at::set_num_threads(threads_of_rank(world.cores()));
  const CollectiveComparison comparison = make_comparison(world, arguments);
  const auto print = [&](const std::string& text) {
    if (world.rank() == 0) out << text << std::flush;
  };
  print(heading(comparison, arguments, world.size()));
  OtherLoad other_load;
  for (const Collective what : kCollectives) {
    for (const std::int64_t bytes : sizes_of(arguments.bytes)) {
      const std::int64_t unit = kElementBytes * world.size();
      const std::int64_t count = (bytes + unit - 1) / unit * world.size();
      check_results(comparison, world, what, count);
      print(measured_row(comparison, world, what, count, arguments.rounds, other_load));
      const at::Tensor stop = at::empty({1}, at::kLong).fill_(signals.received());
      world.group().all_reduce(stop, ReduceOp::kMax, "bench");
      if (stop.item<std::int64_t>() == 0) continue;
      if (world.rank() == 0) err << "birkhoff: stopped on request; run the same command again\n";
      return static_cast<int>(ExitCode::kRequeue);
    }
  }
  print(load_beside_all_ranks(world, other_load));
  return 0;
}

// The command line of a rank.
std::vector<std::string> rank_line(const BenchCommArguments& arguments) {
  std::vector<std::string> line{"bench", "comm"};
  const auto add = [&](const char* name, const auto& value) {
    line.insert(line.end(), {name, fmt::format("{}", value)});
  };
  if (!arguments.config.empty()) {
    line.push_back(arguments.config);
    for (const std::string& setting : arguments.settings) add("--set", setting);
    if (arguments.vocabulary) add("--vocabulary", *arguments.vocabulary);
    const LinkArguments& links = arguments.links;
    if (links.network_gbs) {
      add("--network-gbs", *links.network_gbs);
      add("--network-us", links.network_us);
    }
    if (links.node_gbs) {
      add("--node-gbs", *links.node_gbs);
      add("--node-us", links.node_us);
    }
    if (arguments.json) line.push_back("--json");
  } else {
    add("--device", arguments.device);
    add("--bytes", arguments.bytes);
    if (arguments.ranks_per_node) add("--ranks-per-node", *arguments.ranks_per_node);
  }
  add("--rounds", arguments.rounds);
  return line;
}

}  // namespace

int bench_comm_command(const BenchCommArguments& arguments, std::ostream& out, std::ostream& err) {
  StopSignals signals;  // as for `train`: the supervisor's request must not kill a rank
  const int ranks = ranks_to_run_on(arguments.ranks);
  std::optional<configs::Config> config;
  check_before_ranks([&] {
    sizes_of(arguments.bytes);
    if (arguments.device == "cuda") count_cuda_devices();
    if (!arguments.config.empty()) {
      config = load_config(arguments.config, arguments.settings, UselessValues::kKeep);
      synthetic_vocabulary(*config, arguments.vocabulary);
      check_idle_ranks(*config, static_cast<int>(check_axes(config->mesh(), ranks)));
      if (config->device() == configs::Config::cuda) count_cuda_devices();
    }
    if (ranks < 2) {
      fail(ExitCode::kUsage,
           "bench comm needs at least 2 ranks: add --ranks 2, or start it with mpirun or srun");
    }
    if (ranks % arguments.ranks_per_node.value_or(1) != 0) {
      fail(ExitCode::kUsage, "--ranks-per-node {} does not divide the {}: choose a divisor",
           *arguments.ranks_per_node, counted(ranks, "rank"));
    }
  });
  if (arguments.ranks) return supervise({ranks}, {}, rank_line(arguments), signals, err).code;
  return run_in_world(
      [&](World& world) {
        return config ? replay_in_world(world, arguments, *config, signals, out, err)
                      : measure_in_world(world, arguments, signals, out, err);
      },
      err);
}

}  // namespace birkhoff
