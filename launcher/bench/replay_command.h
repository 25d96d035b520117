// `bench comm CONFIG`: a step's communication, measured next to what is planned and simulated.
#pragma once

#include <ostream>

#include "cluster/world.h"
#include "configs/schema/config.pb.h"
#include "launcher/commands.h"
#include "runtime/stopping/signals.h"

namespace birkhoff {

// Rank 0 measures the computation of a step alone; then all ranks replay it on the configuration's
// mesh, arguments.rounds times. Rank 0 prints the report. Returns the exit code: kRequeue if a
// rank was asked to stop. Collective over the world.
int replay_in_world(World& world, const BenchCommArguments& arguments,
                    const configs::Config& config, const StopSignals& signals, std::ostream& out,
                    std::ostream& err);

}  // namespace birkhoff
