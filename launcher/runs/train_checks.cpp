#include "launcher/runs/train_checks.h"

#include <memory>

#include "cluster/base/error.h"
#include "cluster/mesh.h"
#include "configs/loader/config_io.h"
#include "data/corpus/corpus.h"
#include "models/model.h"
#include "runtime/checkpoint/commit.h"
#include "runtime/checkpoint/run_folder.h"
#include "runtime/run_checks.h"
#include "runtime/tasks/task.h"
#include "runtime/train_run.h"

namespace birkhoff {

configs::Config load_run_config(const std::string& file, const std::vector<std::string>& settings,
                                const std::string& run, bool fresh) {
  const bool resumes =
      !run.empty() && !fresh && !list_checkpoints(RunPaths{run}.checkpoints()).empty();
  return load_config(file, settings, resumes ? UselessValues::kKeep : UselessValues::kRefuse);
}

configs::Config check_before_start(const PlannedRun& planned) {
  configs::Config config =
      load_run_config(planned.config, planned.settings, planned.run, planned.fresh);
  if (config.data().corpus().empty()) {
    fail(ExitCode::kConfig,
         "{}: data.corpus is not set: name a folder made by `birkhoff prepare`, for instance --set "
         "data.corpus=corpus/mine",
         planned.config);
  }
  const Corpus corpus(config.data().corpus());
  // Build the model without values; each rank makes its parameters later, once.
  const std::unique_ptr<Task> task = make_task(config);
  task->make_model(task->inputs(corpus, kTrainSplit), at::kMeta);
  check_run(config, corpus, planned.run, planned.fresh);
  check_idle_ranks(config, static_cast<int>(check_axes(config.mesh(), planned.ranks)));
  return config;
}

}  // namespace birkhoff
