// The problem that a `birkhoff transport` command line states: costs and masses from files of
// numbers, or one of the built-in examples.
//
// Legend: R sources, C targets.
#pragma once

#include <optional>
#include <vector>

#include "attention/kernels/transport/transport.h"
#include "launcher/commands.h"

namespace birkhoff {

struct TransportProblem {
  Transport transport;
  // Of a sort: the values in their given order. The sources are the values, the targets are the
  // positions of the sorted order, and all masses are 1, so the plan is near a permutation matrix.
  std::optional<std::vector<double>> values;
};

// Reads the files that the arguments name. Error(kUsage) unless they state exactly one problem, or
// if a file does not exist. Error(kData) with file and line if a file holds anything but a
// rectangle of finite numbers, or numbers that do not fit the other files.
TransportProblem transport_problem(const TransportArguments& arguments);

}  // namespace birkhoff
