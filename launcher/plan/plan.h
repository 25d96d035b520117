// The prediction of what a configuration needs on a number of ranks, before it runs there
// (docs/plan.md). Local.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "configs/schema/config.pb.h"
#include "launcher/plan/effective_time.h"
#include "launcher/plan/plan_tables.h"

namespace birkhoff {

struct PlanRequest {
  configs::Config config;
  std::int64_t vocabulary = 0;
  int ranks = 1, ranks_per_node = 1;
  // The step time is measured on this machine, or follows from flops_per_second, the speed of the
  // passes. Without either, it is not predicted.
  bool measure = false;
  std::optional<double> flops_per_second;          // of a rank
  std::optional<double> network_bytes_per_second;  // of a node, in one direction
  std::optional<FaultModel> faults;
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
