// The ranks on which a command computes with a trained model: each replica of it is on one rank, or
// is divided over the ranks of a tensor axis.
#pragma once

#include <functional>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "cluster/base/collectives/process_group.h"
#include "cluster/base/tensors/placement.h"

namespace birkhoff {

// Where a command computes.
struct RanksOfCommand {
  std::optional<int> ranks;               // to start here; not set: those that a launcher started
  int tensor = 1;                         // ranks of a replica
  std::string device = "cpu";             // of commands.h
  std::vector<std::string> command_line;  // for ranks that are started here
  std::string model;                      // the path that the user has named
  std::vector<std::string> settings{};    // of evaluation-time fields
  bool sums_on_device = false;            // whether `data` adds up tensors of the device
  std::function<void()> check;            // finds what several ranks cannot do, before they start
  std::string stopped;                    // a message for a request to stop: what was not done
};

// This rank of a command.
struct ModelRank {
  ProcessGroup& world;  // all ranks, for host tensors
  // The ranks with the same part of the model as this one: for tensors of the device with
  // sums_on_device, and for host tensors.
  ProcessGroup &data, &data_on_host;
  ModelPlacement place;  // of this rank's part of the model
  // To be called now and then: ends all ranks with kRequeue if the user asks for it.
  std::function<void()> tick;
};

// Runs `body` in this process, which is the only rank, whatever has started it. `device`: "cpu" or
// "cuda". Error(kUsage) if there is no GPU.
void run_alone(const std::string& device, const std::function<void(const ModelRank&)>& body);

// Runs `body` in this process, or in each of the ranks. Returns the exit code. Before ranks are
// started here, the model's checkpoint is checked, with the settings and the axis that is to divide
// it. Error(kUsage) if `tensor` does not divide the ranks.
int run_on_ranks(const RanksOfCommand& where, const std::function<void(const ModelRank&)>& body,
                 std::ostream& err);

}  // namespace birkhoff
