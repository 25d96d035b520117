#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "cluster/base/cpu.h"
#include "cluster/base/device.h"
#include "cluster/base/error.h"
#include "cluster/base/plural.h"
#include "configs/config_io.h"
#include "data/corpus.h"
#include "launcher/commands.h"
#include "launcher/ranks.h"
#include "launcher/supervisor.h"
#include "models/model.h"
#include "runtime/train_run.h"

namespace birkhoff {
namespace {

// Everything that can be wrong is found here, before MPI is started: once, and in one line.
configs::Config check_before_start(const TrainArguments& arguments, int ranks) {
  configs::Config config = load_config(arguments.config, arguments.settings);
  if (config.device() == configs::Config::cuda) count_cuda_devices();
  if (config.data().corpus().empty()) {
    fail(ExitCode::kConfig,
         "{}: data.corpus is not set: name a folder made by `birkhoff prepare`, for instance --set "
         "data.corpus=corpus/mine",
         arguments.config);
  }
  const Corpus corpus(config.data().corpus());
  check_run(config, corpus, arguments.run, arguments.fresh);
  const std::unique_ptr<Group> one = make_single_group();
  make_model(config, corpus.vocabulary(), ParallelGroups{*one, *one, *one});
  if (config.mesh().data() != 0 && config.mesh().data() != ranks) {
    fail(
        ExitCode::kConfig,
        "mesh.data is {} but the run has {}: start that many, or set mesh.data=0 for all there are",
        config.mesh().data(), counted(ranks, "rank"));
  }
  return config;
}

std::vector<std::string> rank_arguments(const TrainArguments& arguments) {
  std::vector<std::string> line = {"train", arguments.config, "--run", arguments.run};
  for (const std::string& setting : arguments.settings) line.insert(line.end(), {"--set", setting});
  if (arguments.fresh) line.push_back("--fresh");
  return line;
}

// Threads that a rank computes with.
int rank_threads(const configs::Config& config, const World& world) {
  const configs::Invariant& invariant = config.train().invariant();
  return invariant.shards() > 0 ? invariant.threads() : threads_of_rank(world.local_size());
}

int train_in_world(const configs::Config& config, const TrainArguments& arguments, World& world,
                   const StopSignals& signals, std::ostream& err) {
  compute_on_cpu(rank_threads(config, world));
  const auto end_hanging_job = [&](const Verdict& verdict) {
    err << "birkhoff: " << verdict.text << std::endl;
    world.abort(static_cast<int>(verdict.code));
  };
  const Outcome outcome =
      run_training(config, arguments.run, arguments.fresh, world, {signals, end_hanging_job});
  return static_cast<int>(outcome == Outcome::kRequeue ? ExitCode::kRequeue : ExitCode::kOk);
}

}  // namespace

int train_command(const TrainArguments& arguments, std::ostream&, std::ostream& err) {
  // First of all and until MPI has ended: a request to stop must never find the default handler,
  // which would end a rank without a word.
  StopSignals signals;
  const int ranks = ranks_to_run_on(arguments.ranks);
  configs::Config config;
  check_before_ranks([&] { config = check_before_start(arguments, ranks); });
  if (arguments.ranks) return supervise(ranks, rank_arguments(arguments), signals, err);
  return run_in_world(
      [&](World& world) { return train_in_world(config, arguments, world, signals, err); }, err);
}

}  // namespace birkhoff
