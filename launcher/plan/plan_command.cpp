#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <nlohmann/json.hpp>
#include <ostream>

#include "cluster/base/cpu.h"
#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "cluster/base/text/plural.h"
#include "cluster/mesh.h"
#include "configs/loader/check.h"
#include "configs/loader/config_io.h"
#include "data/corpus/corpus.h"
#include "launcher/commands.h"
#include "launcher/measure/report.h"
#include "launcher/measure/synthetic_training.h"
#include "launcher/plan/plan.h"
#include "launcher/processes/ranks.h"
#include "runtime/run_checks.h"
#include "runtime/tasks/task.h"

namespace birkhoff {
namespace {

std::int64_t planned_vocabulary(const PlanArguments& arguments, const configs::Config& config) {
  if (const auto known = vocabulary_without_corpus(config, arguments.vocabulary)) return *known;
  const std::string& corpus = config.data().corpus();
  if (!corpus.empty() && path_exists(corpus)) return vocabulary_of(config, Corpus(corpus));
  fail(ExitCode::kUsage, "the number of token ids is unknown: {}; give it with --vocabulary",
       corpus.empty() ? "data.corpus is not set"
                      : fmt::format("there is no corpus {} (data.corpus)", corpus));
}

PlanRequest request_of(const PlanArguments& arguments, const configs::Config& config) {
  PlanRequest request;
  request.config = config;
  request.vocabulary = planned_vocabulary(arguments, config);
  const std::int64_t of_axes =
      std::max<std::int64_t>(1, config.mesh().data()) * config.mesh().tensor();
  if (of_axes > INT_MAX) {
    fail(ExitCode::kConfig, "mesh: data {} x tensor {} are too many ranks; lower one of them",
         config.mesh().data(), config.mesh().tensor());
  }
  request.ranks = arguments.ranks.value_or(static_cast<int>(of_axes));
  if (config.mesh().data() != 0 && request.ranks != of_axes) {
    fail(ExitCode::kConfig,
         "mesh.data is {} but --ranks is {}: set mesh.data=0, or leave --ranks out",
         config.mesh().data(), request.ranks);
  }
  check_idle_ranks(config, static_cast<int>(check_axes(config.mesh(), request.ranks)));
  const int of_mesh = static_cast<int>(std::min<std::int64_t>(
      INT_MAX, std::int64_t{config.mesh().ranks_per_node()} * config.mesh().tensor()));
  request.ranks_per_node = arguments.ranks_per_node.value_or(of_mesh > 0 ? of_mesh : request.ranks);
  if (of_mesh > 0 && request.ranks_per_node != of_mesh) {
    fail(ExitCode::kUsage,
         "--ranks-per-node is {} but mesh.ranks_per_node is {}: leave the option out, or set "
         "mesh.ranks_per_node=0",
         request.ranks_per_node, config.mesh().ranks_per_node());
  }
  if (request.ranks % request.ranks_per_node != 0) {
    fail(ExitCode::kUsage, "--ranks-per-node {} does not divide the {}: choose a divisor",
         request.ranks_per_node, counted(request.ranks, "rank"));
  }
  request.measure = arguments.measure;
  if (arguments.peak_tflops) request.flops_per_second = *arguments.peak_tflops * 1e12;
  const LinkArguments& links = arguments.links;
  if (links.network_gbs) request.network = link_of(links.network_gbs, links.network_us);
  if (links.node_gbs) {
    if (config.device() != configs::Config::cuda) {
      fail(ExitCode::kUsage,
           "--node-gbs is for device: cuda; on CPUs transfers inside a node are copies, which "
           "--measure times");
    }
    request.node = link_of(links.node_gbs, links.node_us);
  }
  if (arguments.faults_per_day) {
    request.faults = FaultModel{.faults_per_day = *arguments.faults_per_day,
                                .save_seconds = arguments.save_seconds,
                                .restart_seconds = arguments.restart_seconds};
  }
  return request;
}

constexpr double kMaxWhole = 0x1p53;  // doubles up to here hold every integer

bool is_whole(double value) { return std::abs(value) < kMaxWhole && std::floor(value) == value; }

nlohmann::ordered_json number(const std::optional<double>& value) {
  if (!value || !std::isfinite(*value)) return nullptr;
  if (is_whole(*value)) return static_cast<std::int64_t>(*value);
  return *value;
}

// The title and a Markdown table.
std::string table_text(const PlanTable& table) {
  std::vector<std::string> heads = {"part"};
  for (const PlanColumn& column : table.columns) heads.push_back(column.head);
  std::string text = table.title + "\n\n" + table_head(heads);
  for (const PlanRow& row : table.rows) {
    std::vector<std::string> cells = {row.part};
    for (std::size_t i = 0; i < row.values.size(); ++i) {
      cells.push_back(row.values[i] ? figure(*row.values[i] / table.columns[i].unit) : "");
    }
    text += table_row(cells);
  }
  return text;
}

// {part: {column: value}}, with underscores in place of spaces; a value that does not apply is
// null, and whole numbers have no fraction.
nlohmann::ordered_json table_json(const PlanTable& table) {
  auto json = nlohmann::ordered_json::object();
  for (const PlanRow& row : table.rows) {
    std::string key = row.part;
    std::replace(key.begin(), key.end(), ' ', '_');
    for (std::size_t i = 0; i < row.values.size(); ++i) {
      json[key][table.columns[i].key] = number(row.values[i]);
    }
  }
  return json;
}

void print_json(const PlanArguments& arguments, const PlanRequest& request, const Plan& plan,
                std::ostream& out) {
  nlohmann::ordered_json json = {{"config", arguments.config},
                                 {"ranks", request.ranks},
                                 {"ranks_per_node", request.ranks_per_node},
                                 {"vocabulary", request.vocabulary}};
  for (const PlanTable& table : plan.tables) json[table.key] = table_json(table);
  json["notes"] = plan.notes;
  out << json.dump() << '\n';
}

void print_text(const PlanArguments& arguments, const PlanRequest& request, const Plan& plan,
                std::ostream& out) {
  const std::string vocabulary =
      request.vocabulary > 0 ? fmt::format(", with a vocabulary of {}", request.vocabulary) : "";
  out << fmt::format("Plan of {} on {}, {} on each node{}.\n", arguments.config,
                     counted(request.ranks, "rank"), request.ranks_per_node, vocabulary);
  for (const PlanTable& table : plan.tables) out << '\n' << table_text(table);
  for (const std::string& note : plan.notes) out << '\n' << note << '\n';
}

}  // namespace

int plan_command(const PlanArguments& arguments, std::ostream& out) {
  const configs::Config config =
      load_config(arguments.config, arguments.settings, UselessValues::kKeep);
  const PlanRequest request = request_of(arguments, config);
  compute_on_cpu(threads_of_rank(std::max(1, usable_cores() / request.ranks_per_node)));
  Plan plan = make_plan(request);
  for (const UselessValue& value : useless_values(config)) {
    plan.notes.push_back(fmt::format("Warning: {}: {}.", value.path, value.what));
  }
  if (const std::string slow = warning_of_precision(config); !slow.empty()) {
    plan.notes.push_back(fmt::format("Warning: {}.", slow));
  }
  if (arguments.json) {
    print_json(arguments, request, plan, out);
  } else {
    print_text(arguments, request, plan, out);
  }
  return 0;
}

}  // namespace birkhoff
