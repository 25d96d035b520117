// The prediction of what a configuration needs on a number of ranks, before it runs there
// (docs/plan.md). Local.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "configs/schema/config.pb.h"
#include "launcher/measure/step_simulation.h"
#include "launcher/plan/effective_time.h"

namespace birkhoff {

struct PlanRequest {
  configs::Config config;
  std::int64_t vocabulary = 0;
  int ranks = 1, ranks_per_node = 1;
  // The step time is measured on this machine, or follows from flops_per_second, the speed of the
  // passes. Without either, it is not predicted.
  bool measure = false;
  std::optional<double> flops_per_second;  // of a rank
  // Between nodes; not set: not predicted. Inside a node, `node` is for GPUs: on CPUs a transfer is
  // a copy that a core makes.
  std::optional<Link> network, node;
  std::optional<FaultModel> faults;
};

struct PlanColumn {
  std::string key;   // in JSON
  std::string head;  // in text, with its unit
  double unit = 1;   // text shows values divided by this
};

struct PlanRow {
  std::string part;
  std::vector<std::optional<double>> values;  // one for each column; nullopt: does not apply
};

// One subject: a line for each of its parts.
struct PlanTable {
  std::string key;    // in JSON
  std::string title;  // in text, a sentence
  std::vector<PlanColumn> columns;
  std::vector<PlanRow> rows;

  void add(std::string part, std::vector<std::optional<double>> values) {
    rows.push_back({std::move(part), std::move(values)});
  }
};

struct Plan {
  std::vector<PlanTable> tables;
  std::vector<std::string> notes;  // sentences: what could not be predicted, and why
};

// Error(kConfig) as make_model().
Plan make_plan(const PlanRequest& request);

// Peak memory of a rank in bytes, as configured.
double rank_memory(const Plan& plan);

}  // namespace birkhoff
