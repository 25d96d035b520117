#include "runtime/train_run.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>

#include "cluster/base/activity.h"
#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "cluster/base/gpu/device.h"
#include "cluster/base/logging/log.h"
#include "cluster/base/text/number_text.h"
#include "cluster/base/text/plural.h"
#include "cluster/health/heartbeat.h"
#include "cluster/mesh.h"
#include "configs/loader/check.h"
#include "configs/loader/config_io.h"
#include "configs/schema/config.pb.h"
#include "data/batch/partition.h"
#include "data/corpus/corpus.h"
#include "data/corpus/staged_shards.h"
#include "data/loader/loader.h"
#include "models/model.h"
#include "runtime/agreement.h"
#include "runtime/carried_past.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/checkpoint/commit.h"
#include "runtime/checkpoint/run_folder.h"
#include "runtime/checkpoint/shared_verification.h"
#include "runtime/device_prefetcher.h"
#include "runtime/optimizers/schedule.h"
#include "runtime/reporting/progress.h"
#include "runtime/reporting/reporter.h"
#include "runtime/run_checks.h"
#include "runtime/tasks/task.h"
#include "runtime/weights/warm_start.h"

namespace birkhoff {
namespace {

CheckpointHeader make_header(const configs::Config& config, const Corpus& corpus, const Task& task,
                             const ModelInputs& inputs, const std::string& run, int ranks) {
  CheckpointHeader header;
  header.set_program(BIRKHOFF_VERSION);
  header.set_run(run);
  *header.mutable_config() = config;
  header.set_ranks(ranks);
  header.set_corpus(corpus.manifest().fingerprint());
  const auto& tokenizer = corpus.tokenizer_entry(task.target_stream());
  header.set_tokenizer(tokenizer.kind());
  header.set_vocabulary(tokenizer.vocabulary());
  if (!tokenizer.file().empty()) header.set_tokenizer_file(tokenizer.file());
  if (tokenizer.has_end_of_document()) header.set_end_of_document(tokenizer.end_of_document());
  const auto& of_sources = corpus.tokenizer_entry(task.source_stream());
  if (of_sources.SerializeAsString() != tokenizer.SerializeAsString()) {
    *header.mutable_source_tokenizer() = of_sources;
  }
  header.mutable_class_name()->Assign(inputs.class_names.begin(), inputs.class_names.end());
  if (const auto& image = inputs.image) {
    for (const std::int64_t size : {image->rows, image->columns, image->channels}) {
      header.add_image_shape(size);
    }
  }
  return header;
}

LoaderOptions make_loader_options(const configs::Config& config, int rank, int size) {
  LoaderOptions options;
  options.batches = {.global_batch = config.train().global_batch(),
                     .batch_tokens = config.train().batch_tokens(),
                     .lanes = config.model().memory().length() > 0,
                     .seed = config.train().seed(),
                     .shards = config.train().invariant().shards(),
                     .rank = rank,
                     .size = size};
  options.prefetch = config.data().prefetch();
  options.max_readers = config.data().readers();
  return options;
}

std::int64_t optimizer_bytes(const std::vector<TensorPart>& parts) {
  std::int64_t bytes = 0;
  for (const TensorPart& part : parts) {
    if (part.kind == StateKind::kOptimizer) bytes += static_cast<std::int64_t>(part.data.nbytes());
  }
  return bytes;
}

MetricsOptions make_metrics_options(const configs::Config& config, const RunPaths& paths,
                                    const TrainState& state) {
  MetricsOptions options;
  options.lines_path = paths.metrics();
  options.svg_path = paths.loss_plot();
  if (config.metrics().tensorboard()) options.event_folder = paths.root;
  options.split = config.evaluate().split();
  options.first_step = state.step + 1;
  options.num_steps = config.train().steps();
  options.every = config.metrics().every();
  options.terminal = terminal_shows_bar();
  options.run_name = std::filesystem::weakly_canonical(paths.root).filename().string();
  return options;
}

// If the corpus lacks the configured split, or it has no target: nullptr, with one warning.
std::unique_ptr<Evaluator> evaluator_of_run(const Task& task, const configs::Evaluate& what,
                                            const Corpus& corpus, Model& model,
                                            ProcessGroup& group) {
  const std::string& split = what.split();
  const bool has_split = corpus.has_split(split);
  std::unique_ptr<Evaluator> evaluator;
  if (has_split) evaluator = make_evaluator(task, what, corpus, model, group);
  const std::string nothing =
      evaluator != nullptr
          ? ""
          : fmt::format("{}: {}: nothing is evaluated", corpus.folder().string(),
                        has_split ? no_targets_text(split) : fmt::format("no split \"{}\"", split));
  if (evaluator == nullptr && what.patience() > 0) {
    fail(ExitCode::kConfig, "evaluate.patience: {} has no effect: {}; leave it out, or evaluate",
         what.patience(), nothing);
  }
  if (group.rank() != 0) return evaluator;
  if (evaluator == nullptr) {
    log_warning("{}", nothing);
  } else if (const std::string withheld = evaluator->plan().withheld(); !withheld.empty()) {
    log_warning("{}: {}", corpus.folder().string(), withheld);
  }
  return evaluator;
}

// The hosts of the ranks of one data axis: those that hold the first part of the model.
std::vector<std::string> hosts_of_data_axis(const std::vector<std::string>& host_of_rank,
                                            const configs::Config& config) {
  std::vector<std::string> hosts;
  for (std::size_t rank = 0; rank < host_of_rank.size();
       rank += static_cast<std::size_t>(config.mesh().tensor())) {
    hosts.push_back(host_of_rank[rank]);
  }
  return hosts;
}

// What the run's history calls this job.
std::string job_id(const RunHooks& hooks, const World& world) {
  if (!hooks.job_id.empty()) return hooks.job_id;
  return fmt::format("{}-{}-{:.6f}", world.host(), getpid(), unix_seconds());
}

JobStart job_start(const std::string& id, const World& world, std::int64_t step,
                   const std::vector<std::string>& host_of_rank) {
  JobStart start{.time = unix_seconds(),
                 .step = step,
                 .ranks = world.size(),
                 .hosts = {},
                 .program = BIRKHOFF_VERSION,
                 .scheduler_job = scheduler_job(),
                 .id = id};
  for (const std::string& host : host_of_rank) {
    if (std::find(start.hosts.begin(), start.hosts.end(), host) == start.hosts.end()) {
      start.hosts.push_back(host);
    }
  }
  return start;
}

// A run's folder, and where training starts in it. The same on all ranks.
struct OpenedRun {
  std::unique_ptr<RunFolder> folder;  // of rank 0, which holds the run's lock
  std::string id;
  std::string resume_path;  // empty: training starts from nothing
};

// Opens the folder on rank 0, which decides where to start after all ranks have verified the
// checkpoint, and this rank's log in it. Collective over the world.
OpenedRun open_run(const RunPaths& paths, std::uint64_t seed, bool fresh, World& world, Log& log) {
  OpenedRun run;
  SharedVerification verification(world.group());
  if (world.rank() == 0) {
    run.folder = std::make_unique<RunFolder>(paths.root, seed, fresh);
    const auto found = run.folder->find_resume_point(
        [&](const CheckpointFolder& checkpoint) { return verification.verify(checkpoint); });
    if (found) run.resume_path = found->path.string();
    run.id = run.folder->id();
    verification.finish();
  } else {
    verification.help();
  }
  // This also tells the other ranks that the folder exists.
  run.id = world.group().broadcast_bytes(run.id, 0, "identity of the run");
  run.resume_path = world.group().broadcast_bytes(run.resume_path, 0, "checkpoint to resume from");
  check_shared_folder(world.group(), world.host(), paths, run.id);
  log.open(paths.log(world.rank()).string());
  return run;
}

// What training starts from.
struct StartState {
  TrainState train;
  std::optional<configs::Config> before;  // of the checkpoint that it resumes from
  std::int64_t metrics_bytes = 0;         // of metrics.jsonl when that was saved
};

// Loads the checkpoint into `parts`, if there is one, or the weights of a warm start. Collective
// over the world.
StartState load_start(const std::string& resume_path, const configs::Config& config,
                      const Corpus& corpus, World& world, std::vector<TensorPart>& parts) {
  StartState start;
  if (config.train().precision() == configs::Train::fp16) {
    start.train.loss_scale.value = LossScale::kInitial;
  }
  if (resume_path.empty()) {
    const configs::WarmStart& from = config.train().warm_start();
    if (!from.from().empty()) start_warm(from, world.group(), parts);
    return start;
  }
  const CheckpointFolder checkpoint = open_checkpoint(resume_path);
  check_resumable(checkpoint, config, corpus);
  load_checkpoint(checkpoint, parts);
  read_state(checkpoint.manifest, config, start.train);
  start.metrics_bytes = checkpoint.manifest.metrics_bytes();
  start.before = checkpoint.manifest.config();
  return start;
}

// Warnings that the user must see at the start.
void warn_at_start(const configs::Config& config, const Task& task, const Corpus& corpus,
                   const Model& model, const ModelInputs& inputs, const SampleSource& source,
                   const StartState& start, const ProcessGroup& group) {
  for (const std::string& warning : model.warnings()) log_warning("{}", warning);
  warn_of_settings(config, source.num_samples());
  if (const std::string cut = task.cut_texts(corpus, kTrainSplit); !cut.empty()) {
    log_warning("{}", cut);
  }
  const std::int64_t rows =
      rank_share(config.train().global_batch(), config.train().invariant().shards(), group.rank(),
                 group.size())
          .size();
  for (const std::string& line : slow_attention_paths(config, inputs, source.make_batch(rows))) {
    log_warning("attention: {}", line);
  }
  if (start.before) {
    if (config.train().invariant().shards() > 0 &&
        start.before->mesh().tensor() != config.mesh().tensor()) {
      log_warning(
          "mesh.tensor: {} -> {}: the run goes on, but train.invariant promises the same bits only "
          "with the same mesh.tensor",
          start.before->mesh().tensor(), config.mesh().tensor());
    }
    warn_of_rate_jump(start.before->train(), config.train(), start.train.step + 1,
                      start.train.consumed / source.num_samples());
    warn_of_other_losses(*start.before, config);
  }
}

// Why a run has no more steps to do.
std::string end_of_training(const configs::Config& config, const TrainState& state, bool all_done) {
  if (all_done) return fmt::format("train.steps = {}", config.train().steps());
  return fmt::format("the last {} had no new lowest loss, and evaluate.patience = {}",
                     counted(state.stale_evaluations, "evaluation"), config.evaluate().patience());
}

// resumed_from: set to the step that the run resumed from. history: made where training begins, on
// rank 0.
Outcome run_logged(const configs::Config& config, const RunPaths& paths, bool fresh, World& world,
                   const RunHooks& hooks, Log& log, std::int64_t& resumed_from,
                   std::optional<RunHistory>& history) {
  check_same_config(world.group(), config);
  const at::Device device = config.device() == configs::Config::cuda
                                ? cuda_device(world.local_rank())
                                : at::Device(at::kCPU);
  Mesh mesh(world, config.mesh(), device);
  ProcessGroup& group = mesh.data();
  const std::string of_idle_ranks = check_idle_ranks(config, group.size());
  const std::string id = job_id(hooks, world);
  Activity activity;
  const configs::Watchdog& watchdog = config.watchdog();
  const Heartbeat heartbeat(
      world.group(), {watchdog.seconds(), watchdog.steps(), watchdog.patient_seconds()},
      [&] { return make_status(world, activity, mesh.groups()); },
      [&](const Diagnosis& diagnosis) {
        log.write_to_file(LogLevel::kError, diagnosis.text);
        if (world.rank() == 0) {
          note_lost_job(paths.history(), paths.status(), id, static_cast<int>(diagnosis.code),
                        diagnosis.text);
        }
        hooks.on_hang(diagnosis);
      },
      [&](const SlowRank& slow) {
        const std::string problem = note_slow_rank(paths.history(), id, {unix_seconds(), slow});
        if (!problem.empty()) log_warning("{}", problem);
      });
  Corpus corpus(config.data().corpus());
  check_same_corpus(world.group(), corpus);
  if (const configs::Stage& stage = config.data().stage(); !stage.folder().empty()) {
    corpus.stage({.folder = staging_folder(stage.folder()),
                  .max_bytes = static_cast<std::int64_t>(
                      std::ceil(static_cast<double>(stage.max_gb()) * 1e9)),
                  .makes_copies = world.local_rank() == 0});
  }
  OpenedRun run = open_run(paths, config.train().seed(), fresh, world, log);

  const std::unique_ptr<Task> task = make_task(config);
  const ModelInputs inputs = task->inputs(corpus, kTrainSplit);
  const std::optional<NodeGroups> nodes = mesh.nodes();
  ModelPlacement place(group.device(), &mesh.tensor(), &group);
  place.sliced =
      config.train().zero_stage() > 2 && (nodes ? nodes->inside->size() : group.size()) > 1;
  const std::unique_ptr<Model> model = task->make_model(inputs, place);
  GradBuckets buckets(model->parameters(), group, config.train().bucket_elements(),
                      config.train().invariant().shards(), config.train().zero_stage(), nodes);
  const std::unique_ptr<Optimizer> optimizer = make_optimizer(config.train().optimizer(), buckets);
  std::unique_ptr<SampleSource> source = task->training_source(corpus);
  CarriedPast past(config, *model, group, source->num_samples());
  std::vector<TensorPart> parts = training_parts(*model, buckets, *optimizer, world.size());
  for (TensorPart& part : past.parts()) parts.push_back(std::move(part));
  StartState start = load_start(run.resume_path, config, corpus, world, parts);
  TrainState& state = start.train;
  resumed_from = state.step;
  activity.enter(Phase::kStart, state.step);
  const bool all_done = state.step >= config.train().steps() && !state.evaluation_due;
  if (all_done || state.ends_early(config.evaluate())) {
    if (world.rank() == 0) {
      // The run may have been killed before it wrote the picture.
      if (!path_exists(paths.loss_plot().string())) {
        Metrics(make_metrics_options(config, paths, state)).close();
      }
      log_info("{}: is at step {}, and {}: nothing to do; raise it to continue",
               paths.root.string(), state.step, end_of_training(config, state, all_done));
    }
    return Outcome::kDone;
  }
  const std::vector<std::string> host_of_rank =
      world.group().all_gather_bytes(world.host(), "hosts of the run");
  if (world.rank() == 0) {
    history.emplace(paths.history(), paths.status(), job_start(id, world, state.step, host_of_rank),
                    config.train().steps());
    log_info("{}: {} at step {} of {}; {}, {}", paths.root.string(),
             run.resume_path.empty() ? "starts" : "resumes", state.step, config.train().steps(),
             counted(model->parameters().num_elements(), "parameter"),
             counted(world.size(), "rank"));
    log_info("optimizer state: {} on this rank, {}", counted(optimizer_bytes(parts), "byte"),
             buckets.sliced()
                 ? fmt::format("one of {} slices (train.zero_stage)", buckets.slice_group().size())
             : mesh.tensor().size() > 1 ? "all of its part of the model"
                                        : "all of it");
    log_info("memory before the first step: {}", memory_report(device));
    warn_at_start(config, *task, corpus, *model, inputs, *source, start, group);
    for (const std::string& warning :
         {of_idle_ranks, warning_of_nodes(config, hosts_of_data_axis(host_of_rank, config)),
          warning_of_replicas(config, host_of_rank), warning_of_precision(config)}) {
      if (!warning.empty()) log_warning("{}", warning);
    }
    write_file_durably(paths.config().string(), config_text(config));
    run.folder->cut_metrics(start.metrics_bytes);
  }

  const std::int64_t samples_per_epoch = source->num_samples();
  TrainLoader loader(std::move(source), make_loader_options(config, group.rank(), group.size()),
                     state.consumed);
  DevicePrefetcher feed([&] { return loader.next([&] { return hooks.stop.pressing(); }); }, device);
  const std::unique_ptr<Evaluator> evaluator =
      evaluator_of_run(*task, config.evaluate(), corpus, *model, group);

  std::optional<Metrics> metrics;  // of rank 0
  std::unique_ptr<Reporter> reporter;
  if (world.rank() == 0) {
    metrics.emplace(make_metrics_options(config, paths, state));
    reporter = std::make_unique<RunReporter>(*metrics, *history);
  } else {
    reporter = std::make_unique<StepLog>(config.metrics().every(), config.train().steps());
  }
  std::vector<std::filesystem::path> tokenizer_files;
  for (const std::string& stream : {task->target_stream(), task->source_stream()}) {
    const std::filesystem::path file = corpus.tokenizer_file(stream);
    if (!file.empty() && std::ranges::find(tokenizer_files, file) == tokenizer_files.end()) {
      tokenizer_files.push_back(file);
    }
  }
  std::function<void()> require_folder;  // of rank 0
  if (run.folder) require_folder = [&] { run.folder->lease().check(); };
  CheckpointWriter writer(paths.checkpoints(),
                          {config.checkpoint().keep(), config.checkpoint().keep_best()},
                          tokenizer_files, world.group(), require_folder);
  Agreement agreement(world.group(), mesh.data_on_host(), parts, world.host(),
                      mesh.across_nodes_on_host(), &mesh.tensor_on_host());
  RunCheckpoints checkpoints(
      &writer, world.group(), make_header(config, corpus, *task, inputs, run.id, world.size()),
      parts, run.resume_path.empty() ? std::nullopt : std::optional(resumed_from), run.folder.get(),
      *reporter);
  checkpoints.check_space();

  Trainer trainer({config, *model, feed, group, world.group(), buckets, *optimizer, hooks.stop,
                   *reporter, activity, checkpoints, samples_per_epoch, evaluator.get(), &agreement,
                   buckets.passes_are_collective() || has_batch_norm(config.task())
                       ? &world.group()
                       : &mesh.tensor_on_host(),
                   &past});
  const Outcome outcome = trainer.run(state);
  if (world.rank() != 0) return outcome;
  // Such a job would be requeued again and again.
  if (outcome == Outcome::kRequeue && hooks.stop.by_time_limit() &&
      checkpoints.newest().value_or(0) <= resumed_from) {
    fail(ExitCode::kUsage,
         "{}: the job's time limit is too short for a step and a save after step {}: give the job "
         "more time",
         paths.root.string(), resumed_from);
  }
  metrics->close();
  log_info("memory: {}", memory_report(device));
  if (outcome == Outcome::kDone) {
    log_info("{}: finished: {}, {}; checkpoint {}", paths.root.string(),
             counted(state.step, "step"), metrics->summary(),
             (paths.checkpoints() / step_name(state.step)).string());
  }
  return outcome;
}

}  // namespace

void check_run(const configs::Config& config, const Corpus& corpus,
               const std::filesystem::path& run_folder, bool fresh) {
  make_task(config)->check_source(corpus);
  check_evaluation(config, corpus);
  RunFolder::check_usable(run_folder);
  if (fresh) return;
  const auto checkpoints = list_checkpoints(RunPaths{run_folder}.checkpoints());
  if (checkpoints.empty()) return;
  CheckpointFolder newest;
  try {
    newest = open_checkpoint(checkpoints.rbegin()->second);
  } catch (const Error&) {
    return;  // the run reports it and sets it aside
  }
  check_resumable(newest, config, corpus);
}

Outcome run_training(const configs::Config& config, const std::filesystem::path& run_folder,
                     bool fresh, World& world, const RunHooks& hooks) {
  const RunPaths paths{run_folder};
  Log log(world.rank());
  std::optional<RunHistory> history;
  const auto note_end = [&](ExitCode code, const std::string& reason) {
    if (history) history->end(static_cast<int>(code), reason);
    history.reset();
  };
  try {
    std::int64_t resumed_from = -1;
    for (int num_restores = 0;;) {
      const std::int64_t before = resumed_from;
      const Outcome outcome =
          run_logged(config, paths, fresh, world, hooks, log, resumed_from, history);
      switch (outcome) {
        case Outcome::kDone:
          note_end(ExitCode::kOk, "finished");
          return outcome;
        case Outcome::kRequeue:
          note_end(ExitCode::kRequeue, hooks.stop.why());
          return outcome;
        case Outcome::kRestore:
          note_end(ExitCode::kNumerical, "ranks differed: back to the last checkpoint");
          break;
      }
      fresh = false;
      num_restores = resumed_from == before ? num_restores + 1 : 1;
      if (num_restores > config.agreement().max_restores()) {
        fail(
            ExitCode::kNumerical,
            "ranks disagreed {} after step {}, more often than agreement.max_restores = {} allows; "
            "the warnings above name them",
            counted(num_restores, "time"), resumed_from, config.agreement().max_restores());
      }
    }
  } catch (const FolderLost&) {
    throw;  // the folder is another job's, with its history and its log
  } catch (const Error& error) {
    note_end(error.code(), error.what());
    log.write_to_file(LogLevel::kError, error.what());
    throw;
  } catch (const std::exception& error) {
    note_end(ExitCode::kInternal, error.what());
    log.write_to_file(LogLevel::kError, error.what());
    throw;
  }
}

}  // namespace birkhoff
