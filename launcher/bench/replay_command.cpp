#include "launcher/bench/replay_command.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cluster/base/cpu.h"
#include "cluster/base/error.h"
#include "cluster/base/gpu/device.h"
#include "cluster/base/text/plural.h"
#include "cluster/mpi_group.h"
#include "launcher/bench/step_replay.h"
#include "launcher/measure/imitated_rank.h"
#include "launcher/measure/report.h"
#include "launcher/measure/step_simulation.h"
#include "launcher/measure/synthetic_training.h"
#include "launcher/processes/ranks.h"
#include "runtime/run_checks.h"

namespace birkhoff {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kGroupNames[kNumGroupKinds] = {"world", "data", "tensor", "inside nodes",
                                                     "across nodes"};

// A schedule as text, and back.
std::string to_text(const StepSchedule& schedule) {
  Json operations = Json::array(), events = Json::array();
  for (const ScheduledOperation& each : schedule.operations) {
    operations.push_back({each.group, each.what, each.purpose, each.input_bytes, each.bytes,
                          each.element_bytes, each.caller_waits});
  }
  for (const ScheduledEvent& each : schedule.events) {
    events.push_back({each.kind, each.part, each.amount, each.operation});
  }
  return Json{{"operations", operations}, {"events", events}}.dump();
}

StepSchedule schedule_of(const std::string& text) {
  const Json json = Json::parse(text);
  StepSchedule schedule;
  for (const Json& each : json["operations"]) {
    schedule.operations.push_back({each[0].get<GroupKind>(), each[1].get<Collective>(), each[2],
                                   each[3], each[4], each[5], each[6]});
  }
  for (const Json& each : json["events"]) {
    schedule.events.push_back({each[0].get<ScheduledEvent::Kind>(), each[1].get<StepPart>(),
                               each[2], each[3].get<std::size_t>()});
  }
  return schedule;
}

StepSchedule common_schedule(World& world, const configs::Config& config, std::int64_t vocabulary,
                             at::Device device) {
  constexpr int kRounds = 5;
  std::string text;
  if (world.rank() == 0) {
    text = to_text(measured_schedule(config, vocabulary, world.size(), device, kRounds));
  }
  return schedule_of(world.group().broadcast_bytes(text, 0, "schedule of a step"));
}

// Operations and bytes of the groups of one kind, on average over the world's ranks.
struct GroupBytes {
  std::int64_t operations = 0;
  double planned = 0, planned_between = 0;
  double counted = NAN;  // NaN: by a group that does not count
};

// Of MpiGroups, by GroupKind; -1: another group.
std::vector<double> counters(Mesh& mesh, World& world) {
  std::vector<double> counted(kNumGroupKinds, -1);
  const auto count = [&](GroupKind kind, const ProcessGroup& group) {
    if (const auto* mpi = dynamic_cast<const MpiGroup*>(&group)) {
      counted[static_cast<std::size_t>(kind)] = static_cast<double>(mpi->bytes_sent());
    }
  };
  count(GroupKind::kWorld, world.group());
  count(GroupKind::kData, mesh.data());
  count(GroupKind::kTensor, mesh.tensor());
  if (const auto nodes = mesh.nodes()) {
    count(GroupKind::kInsideNodes, *nodes->inside);
    count(GroupKind::kAcrossNodes, *nodes->across);
  }
  return counted;
}

Json report_of(const std::vector<GroupBytes>& groups) {
  Json json = Json::object();
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const GroupBytes& each = groups[i];
    if (each.operations == 0) continue;
    json[kGroupNames[i]] = {{"operations", each.operations},
                            {"planned_bytes", each.planned},
                            {"planned_bytes_to_other_nodes", each.planned_between},
                            {"sent_bytes", each.counted}};
  }
  return json;
}

std::string table_of(const std::vector<GroupBytes>& groups) {
  std::string text = table_head({"group", "operations", "MB planned", "MB sent", "sent / planned",
                                 "MB to other nodes, planned"});
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const GroupBytes& each = groups[i];
    if (each.operations == 0) continue;
    text += table_row({kGroupNames[i], std::to_string(each.operations), figure(each.planned / 1e6),
                       std::isnan(each.counted) ? "" : figure(each.counted / 1e6),
                       std::isnan(each.counted) ? "" : figure(each.counted / each.planned),
                       figure(each.planned_between / 1e6)});
  }
  return text;
}

}  // namespace

int replay_in_world(World& world, const BenchCommArguments& arguments,
                    const configs::Config& config, const StopSignals& signals, std::ostream& out,
                    std::ostream& err) {
  compute_on_cpu(threads_of_rank(world.cores()));
  const at::Device device = config.device() == configs::Config::cuda
                                ? cuda_device(world.local_rank())
                                : at::Device(at::kCPU);
  check_same_config(world.group(), config);
  const StepSchedule schedule =
      common_schedule(world, config, synthetic_vocabulary(config, arguments.vocabulary), device);
  Mesh mesh(world, config.mesh(), device);
  const MeshShape shape = mesh_shape(config, world.size());
  StepReplay replay(schedule, mesh, world);
  replay.run();  // connects the ranks

  // Rounds, and what the groups sent in the last one.
  const at::Tensor seconds = at::empty({arguments.rounds}, at::kDouble);
  std::vector<double> before, after;
  for (int round = 0; round < arguments.rounds; ++round) {
    before = counters(mesh, world);
    seconds[round] = replay.run();
    after = counters(mesh, world);
    if (any_rank(world.group(), signals.received() != 0, "stop on request")) {
      if (world.rank() == 0) err << "birkhoff: stopped on request; run the same command again\n";
      return static_cast<int>(ExitCode::kRequeue);
    }
  }
  const at::Tensor sent = at::zeros({static_cast<std::int64_t>(kNumGroupKinds)}, at::kDouble);
  for (std::size_t i = 0; i < kNumGroupKinds; ++i) {
    sent.mutable_data_ptr<double>()[i] = after[i] - before[i];
  }
  world.group().all_reduce(seconds, ReduceOp::kMax, "bench");
  world.group().all_reduce(sent, ReduceOp::kSum, "bench");
  if (world.rank() != 0) return 0;

  std::vector<GroupBytes> groups(kNumGroupKinds);
  for (const Exchange& each : exchanges_of(schedule, shape, world.local_size())) {
    GroupBytes& group = groups[static_cast<std::size_t>(each.group)];
    group.operations += each.operations;
    group.planned += each.sent_bytes;
    group.planned_between += each.sent_to_other_nodes;
  }
  for (std::size_t i = 0; i < kNumGroupKinds; ++i) {
    if (after[i] >= 0) groups[i].counted = sent.const_data_ptr<double>()[i] / world.size();
  }
  const double* begin = seconds.const_data_ptr<double>();
  const double step = median({begin, begin + arguments.rounds});
  const LinkArguments& links = arguments.links;
  const SimulatedStep simulated =
      simulate(schedule, shape,
               {world.local_size(), link_of(links.node_gbs, links.node_us),
                link_of(links.network_gbs, links.network_us)});
  if (arguments.json) {
    out << Json{{"ranks", world.size()},
                {"ranks_per_node", world.local_size()},
                {"step_seconds", step},
                {"computation_seconds", simulated.computation},
                {"forward_seconds", schedule.amount(StepPart::kForward)},
                {"backward_seconds", schedule.amount(StepPart::kBackward)},
                {"simulated_seconds", simulated.seconds},
                {"groups", report_of(groups)}}
               .dump()
        << '\n';
    return 0;
  }
  const auto ms = [](double value) { return figure(value * 1e3); };
  out << report_title(arguments.line, device, world.size())
      << fmt::format(
             "\nCommunication of a step on data {} x tensor {}, {} on this node. Computation is a "
             "timed wait, as long as rank 0 alone just took ({}). Bytes of a rank, on average.\n\n",
             world.size() / config.mesh().tensor(), config.mesh().tensor(),
             counted(world.local_size(), "rank"), ms(simulated.computation) + " ms")
      << table_of(groups)
      << fmt::format(
             "\nA step takes {} ms (median of {}, slowest rank), of which {} ms are exposed "
             "communication. Simulated: {} ms, measured / simulated {}.\n",
             ms(step), arguments.rounds, ms(step - simulated.computation), ms(simulated.seconds),
             figure(step / simulated.seconds));
  return 0;
}

}  // namespace birkhoff
