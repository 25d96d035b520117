#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "cluster/base/cpu.h"
#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "cluster/base/gpu/device.h"
#include "cluster/base/text/plural.h"
#include "configs/config_io.h"
#include "data/corpus/corpus.h"
#include "launcher/commands.h"
#include "launcher/processes/ranks.h"
#include "launcher/processes/supervisor.h"
#include "models/model.h"
#include "runtime/tasks/task.h"
#include "runtime/train_run.h"

namespace birkhoff {
namespace {

// Finds all errors that can be found before MPI starts, so that they are reported once and in one
// line.
configs::Config check_before_start(const TrainArguments& arguments, int ranks) {
  configs::Config config = load_config(arguments.config, arguments.settings);
  if (config.device() == configs::Config::cuda) count_cuda_devices();
  if (config.data().corpus().empty()) {
    fail(ExitCode::kConfig,
         "{}: data.corpus is not set: name a folder made by `birkhoff prepare`, for instance --set "
         "data.corpus=corpus/mine",
         arguments.config);
  }
  if (config.train().invariant().shards() > 0) {
    check_threads("train.invariant.threads", config.train().invariant().threads(),
                  ExitCode::kConfig);
  }
  const Corpus corpus(config.data().corpus());
  // Build the model without values; each rank makes its parameters later, once.
  const std::unique_ptr<ProcessGroup> one = make_single_group(at::kMeta);
  make_model(config, model_inputs(config, corpus), ParallelGroups{*one, *one, *one});
  check_run(config, corpus, arguments.run, arguments.fresh);
  if (config.mesh().data() != 0 && config.mesh().data() != ranks) {
    fail(ExitCode::kConfig,
         "mesh.data is {} but the run has {}: start that many, or set mesh.data=0 to use all",
         config.mesh().data(), counted(ranks, "rank"));
  }
  return config;
}

// A text in memory, as a file that processes on this machine can open while this object exists.
class FileInMemory {
 public:
  explicit FileInMemory(const std::string& text) : fd_(memfd_create("text", MFD_CLOEXEC)) {
    if (fd_.get() < 0) fail(ExitCode::kMemory, "memfd_create: {}", std::strerror(errno));
    File file = File::open_for_append(path());
    file.write_all(text);
    file.close();
  }
  std::string path() const { return fmt::format("/proc/{}/fd/{}", getpid(), fd_.get()); }

 private:
  UniqueHandle<FileDescriptorTraits> fd_;
};

// Runs this command line on ranks, which read the same configuration. A pipe can be read only once,
// so its ranks read the resolved configuration instead.
int train_on_ranks(const TrainArguments& arguments, const configs::Config& config, int ranks,
                   StopSignals& signals, std::ostream& err) {
  std::optional<FileInMemory> resolved;
  if (is_pipe(arguments.config)) resolved.emplace(config_text(config));
  std::vector<std::string> line = {"train", resolved ? resolved->path() : arguments.config, "--run",
                                   arguments.run};
  if (!resolved) {
    for (const std::string& setting : arguments.settings) {
      line.insert(line.end(), {"--set", setting});
    }
  }
  if (arguments.fresh) line.push_back("--fresh");
  return supervise(ranks, line, signals, err);
}

// The number of threads that a rank computes with.
int rank_threads(const configs::Config& config, const World& world) {
  const configs::Invariant& invariant = config.train().invariant();
  return invariant.shards() > 0 ? invariant.threads() : threads_of_rank(world.local_size());
}

int train_in_world(const configs::Config& config, const TrainArguments& arguments, World& world,
                   const StopSignals& signals, std::ostream& err) {
  compute_on_cpu(rank_threads(config, world));
  const auto end_hanging_job = [&](const Diagnosis& diagnosis) {
    err << "birkhoff: " << diagnosis.text << std::endl;
    world.abort(static_cast<int>(diagnosis.code));
  };
  const Outcome outcome =
      run_training(config, arguments.run, arguments.fresh, world, {signals, end_hanging_job});
  return static_cast<int>(outcome == Outcome::kRequeue ? ExitCode::kRequeue : ExitCode::kOk);
}

}  // namespace

int train_command(const TrainArguments& arguments, std::ostream&, std::ostream& err) {
  // Exists from the start until MPI has ended: a request to stop must never reach the default
  // handler, which would end a rank without a message.
  StopSignals signals;
  const int ranks = ranks_to_run_on(arguments.ranks);
  configs::Config config;
  check_before_ranks([&] { config = check_before_start(arguments, ranks); });
  if (arguments.ranks) return train_on_ranks(arguments, config, ranks, signals, err);
  return run_in_world(
      [&](World& world) { return train_in_world(config, arguments, world, signals, err); }, err);
}

}  // namespace birkhoff
