#include <ATen/Parallel.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <memory>
#include <optional>
#include <ostream>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "cluster/base/checksum.h"
#include "cluster/base/device.h"
#include "cluster/base/error.h"
#include "cluster/base/file.h"
#include "cluster/world.h"
#include "configs/config_io.h"
#include "data/corpus.h"
#include "launcher/commands.h"
#include "launcher/cores.h"
#include "launcher/failure.h"
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
    fail(ExitCode::kConfig,
         "mesh.data is {} but there are {} ranks: start that many, or set mesh.data=0 for all "
         "there are",
         config.mesh().data(), ranks);
  }
  return config;
}

// OpenMP's reading: a number, or a list with one for each level of nesting. What OpenMP would
// ignore is an error.
std::optional<int> threads_asked_for() {
  const char* set = std::getenv("OMP_NUM_THREADS");
  if (set == nullptr || *set == '\0') return std::nullopt;
  const std::string_view text = set;
  int threads = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), threads);
  const bool complete = end == text.data() + text.size() || *end == ',';
  if (error == std::errc() && complete && threads > 0) return threads;
  fail(ExitCode::kUsage,
       "OMP_NUM_THREADS is '{}': set it to a number of threads of at least 1, or unset it", text);
}

// Threads a rank may use: what OMP_NUM_THREADS says, else the cores this process may run on, shared
// with the ranks beside it unless the launcher has already given each its own.
int threads_of_rank(int local_ranks) {
  if (const std::optional<int> threads = threads_asked_for()) return *threads;
  const int allowed = usable_cores();
  return allowed < machine_cores() ? allowed : std::max(1, allowed / local_ranks);
}

std::vector<std::string> rank_arguments(const TrainArguments& arguments) {
  std::vector<std::string> line = {"train", arguments.config, "--run", arguments.run};
  for (const std::string& setting : arguments.settings) line.insert(line.end(), {"--set", setting});
  if (arguments.fresh) line.push_back("--fresh");
  return line;
}

// An error inside a world of ranks: the others may sit in a collective that this one will never
// join, so all are ended with its code. Often all ranks find the same error; rank 0 says it at once
// and the others give it the time to end them.
[[noreturn]] void end_world(World& world, const Failure& failure, std::ostream& err) {
  if (world.rank() != 0) std::this_thread::sleep_for(std::chrono::seconds(1));
  err << "birkhoff: " << (world.rank() == 0 ? "" : "rank " + std::to_string(world.rank()) + ": ")
      << failure.what << std::endl;
  world.abort(static_cast<int>(failure.code));
}

// Hash of the file this process runs.
std::string program_hash() {
  File file = File::open_for_read("/proc/self/exe");
  Xxh3Hasher hasher;
  std::vector<char> buffer(std::size_t{1} << 20);
  while (const std::size_t num_read = file.read_some(buffer.data(), buffer.size())) {
    hasher.update(buffer.data(), num_read);
  }
  return hasher.hex_digest();
}

// Ranks of different builds would train apart, or not understand each other. Collective.
void check_same_program(World& world) {
  const std::string mine = program_hash() + '\n' + version_text();
  const std::vector<std::string> all = world.group().all_gather_bytes(mine, "program");
  for (int rank = 1; rank < world.size(); ++rank) {
    const std::string& other = all[static_cast<std::size_t>(rank)];
    if (other == all[0]) continue;
    std::istringstream lines(other), lines_0(all[0]);
    std::string line, line_0, difference;
    while (std::getline(lines, line) && std::getline(lines_0, line_0)) {
      if (line == line_0) continue;
      difference += (difference.empty() ? "" : "; ") + line + " instead of " + line_0;
    }
    fail(ExitCode::kUsage,
         "rank {} runs another program than rank 0 (hash of its file, versions it was built with): "
         "{}; install one build of birkhoff on all machines",
         rank, difference);
  }
}

// Threads that a rank computes with.
int rank_threads(const configs::Config& config, const World& world) {
  const configs::Invariant& invariant = config.train().invariant();
  return invariant.shards() > 0 ? invariant.threads() : threads_of_rank(world.local_size());
}

int train_in_world(const configs::Config& config, const TrainArguments& arguments,
                   const StopSignals& signals, std::ostream& err) {
  World world;
  try {
    at::set_num_threads(rank_threads(config, world));
    check_same_program(world);
    const auto end_hanging_job = [&](const Verdict& verdict) {
      err << "birkhoff: " << verdict.text << std::endl;
      world.abort(static_cast<int>(verdict.code));
    };
    const Outcome outcome =
        run_training(config, arguments.run, arguments.fresh, world, {signals, end_hanging_job});
    return static_cast<int>(outcome == Outcome::kRequeue ? ExitCode::kRequeue : ExitCode::kOk);
  } catch (...) {
    if (world.size() == 1) throw;
    end_world(world, describe_failure(std::current_exception()), err);
  }
}

}  // namespace

int train_command(const TrainArguments& arguments, std::ostream&, std::ostream& err) {
  // First of all and until MPI has ended: a request to stop must never find the default handler,
  // which would end a rank without a word.
  const StopSignals signals;
  const int announced = announced_ranks();
  if (arguments.ranks && announced > 1) {
    fail(ExitCode::kUsage,
         "--ranks {} inside a world of {} ranks that mpirun or srun has started: leave --ranks out",
         *arguments.ranks, announced);
  }
  configs::Config config;
  try {
    threads_asked_for();
    config = check_before_start(arguments, arguments.ranks.value_or(announced));
  } catch (const Error&) {
    // Every rank finds the same error. Rank 0 says it; the others wait a moment for mpirun to end
    // them, and speak only if they are alone with it (a file missing on their machine).
    if (announced_rank() != 0) std::this_thread::sleep_for(std::chrono::seconds(2));
    throw;
  }
  if (arguments.ranks) return supervise(*arguments.ranks, rank_arguments(arguments), signals, err);
  return train_in_world(config, arguments, signals, err);
}

}  // namespace birkhoff
