#include "runtime/run_checks.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <thread>
#include <vector>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "cluster/base/instruction_set.h"
#include "cluster/base/logging/log.h"
#include "cluster/base/text/number_text.h"
#include "cluster/base/text/plural.h"
#include "configs/loader/check.h"
#include "configs/loader/config_io.h"
#include "data/batch/partition.h"
#include "runtime/optimizers/schedule.h"

namespace birkhoff {
namespace {

// The differences on one line; with fixed_only, only those in fixed fields.
std::string differences_text(const configs::Config& before, const configs::Config& after,
                             bool fixed_only) {
  std::string text;
  for (const ConfigDifference& difference : diff_configs(before, after)) {
    if (fixed_only && !difference.fixed) continue;
    text += fmt::format("{}{}: {} -> {}", text.empty() ? "" : ", ", difference.path,
                        difference.before, difference.after);
  }
  return text;
}

// If `mine` is not empty on some rank, throws on all ranks and names the first such rank.
// Collective.
void fail_together(ProcessGroup& world, ExitCode code, const std::string& what,
                   const std::string& mine) {
  const std::vector<std::string> all = world.all_gather_bytes(mine, "agreement on " + what);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (!all[rank].empty()) {
      fail(code, "rank {} has a different {} than rank 0: {}; give all ranks the same", rank, what,
           all[rank]);
    }
  }
}

}  // namespace

void check_same_config(ProcessGroup& world, const configs::Config& config) {
  const std::string text = config_text(config);
  const std::string rank_0_text = world.broadcast_bytes(text, 0, "configuration");
  std::string difference;
  if (text != rank_0_text) {
    difference = differences_text(parse_config(rank_0_text, "rank 0", {}), config, false);
  }
  fail_together(world, ExitCode::kConfig, "configuration", difference);
}

void check_same_corpus(ProcessGroup& world, const Corpus& corpus) {
  const std::string& mine = corpus.manifest().fingerprint();
  const std::string rank_0 = world.broadcast_bytes(mine, 0, "corpus");
  std::string difference;
  if (mine != rank_0) {
    difference = fmt::format("fingerprint {} -> {} in {}", rank_0, mine, corpus.folder().string());
  }
  fail_together(world, ExitCode::kData, "corpus", difference);
}

void check_shared_folder(ProcessGroup& world, const std::string& host, const RunPaths& paths,
                         const std::string& id, std::chrono::milliseconds patience) {
  constexpr std::chrono::milliseconds kPause{50};
  constexpr std::int64_t kMaxBytes = 65536;
  const std::string file = paths.identity().string();
  const auto sees = [&] {
    return path_exists(file) && read_file(file, kMaxBytes).find(id) != std::string::npos;
  };
  const auto deadline = std::chrono::steady_clock::now() + patience;
  std::string problem;
  try {
    while (!sees()) {
      if (std::chrono::steady_clock::now() > deadline) {
        problem = fmt::format(
            "rank {} on {} does not see {}, which rank 0 wrote: use a folder on a file system that "
            "all hosts share for --run",
            world.rank(), host, file);
        break;
      }
      std::this_thread::sleep_for(kPause);
    }
  } catch (const Error& error) {
    problem = fmt::format("rank {} on {}: {}", world.rank(), host, error.what());
  }
  for (const std::string& of_rank : world.all_gather_bytes(problem, "shared run folder")) {
    if (!of_rank.empty()) fail(ExitCode::kStorage, "{}", of_rank);
  }
}

void check_resumable(const CheckpointFolder& checkpoint, const configs::Config& config,
                     const Corpus& corpus) {
  const configs::CheckpointManifest& manifest = checkpoint.manifest;
  const std::string difference = differences_text(manifest.config(), config, true);
  if (!difference.empty()) {
    fail(ExitCode::kConfig,
         "{}: this run cannot resume with changed fixed fields: {}; restore them, or train in "
         "another run folder",
         checkpoint.path.string(), difference);
  }
  if (manifest.corpus() != corpus.manifest().fingerprint()) {
    fail(
        ExitCode::kData,
        "{}: made with the corpus {}, but {} is {}; point data.corpus to the same corpus, or train "
        "in another run folder",
        checkpoint.path.string(), manifest.corpus(), corpus.folder().string(),
        corpus.manifest().fingerprint());
  }
}

void warn_of_settings(const configs::Config& config, std::int64_t num_samples) {
  for (const UselessValue& value : useless_values(config)) {
    log_warning("{}: {}", value.path, value.what);
  }
  const configs::Train& train = config.train();
  const configs::Schedule& schedule = train.schedule();
  if (schedule.shape() != configs::Schedule::rsqrt_decay &&
      schedule.warmup_steps() >= train.steps()) {
    log_warning(
        "the warm-up (train.schedule.warmup_steps = {}) is not shorter than the run (train.steps = "
        "{}): the learning rate only rises; warm up for fewer steps",
        schedule.warmup_steps(), train.steps());
  }
  if (train.batch_tokens() > 0) return;  // steps differ in their numbers of samples
  // The last step's first sample has an epoch below this.
  const double epochs =
      static_cast<double>(train.steps()) * train.global_batch() / static_cast<double>(num_samples);
  for (const std::int32_t epoch : schedule.decay_epoch()) {
    if (epoch < epochs) continue;
    log_warning(
        "train.schedule.decay_epoch: {} is not reached: train.steps = {} of train.global_batch = {} "
        "end in epoch {}, of {} each",
        epoch, train.steps(), train.global_batch(),
        static_cast<std::int64_t>(std::ceil(epochs)) - 1, counted(num_samples, "sample"));
    break;
  }
  if (train.global_batch() > num_samples) {
    log_warning("train.global_batch = {} sequences, but an epoch has {}: each step repeats some",
                train.global_batch(), num_samples);
  }
}

std::string check_idle_ranks(const configs::Config& config, int num_ranks) {
  const configs::Train& train = config.train();
  // With batch_tokens, batches have at least half of global_batch (data/loader/batch_plan.h).
  const std::int64_t samples =
      train.batch_tokens() > 0 ? (train.global_batch() + 1) / 2 : train.global_batch();
  int idle = 0;
  for (int rank = 0; rank < num_ranks; ++rank) {
    idle += rank_share(samples, train.invariant().shards(), rank, num_ranks).size() == 0;
  }
  if (idle == 0) return "";
  std::string batch = fmt::format("train.global_batch = {}", train.global_batch());
  if (train.invariant().shards() > 0) {
    batch += fmt::format(" in train.invariant.shards = {}", train.invariant().shards());
  }
  if (train.batch_tokens() > 0) {
    batch = fmt::format("batches of train.batch_tokens = {} may have only {}", train.batch_tokens(),
                        counted(samples, "sample"));
  }
  const std::string what =
      fmt::format("{} of {} compute nothing{}: {}", idle, counted(num_ranks, "rank"),
                  train.batch_tokens() > 0 ? " in some steps" : "", batch);
  if (has_batch_norm(config.task())) {
    fail(ExitCode::kConfig,
         "{}, and with batch norms all must take part in each pass; start at most {} data-parallel "
         "ranks",
         what, num_ranks - idle);
  }
  if (train.zero_stage() > 1) {
    fail(ExitCode::kConfig,
         "{}, and with train.zero_stage {} all must make the same passes; start at most {} data-"
         "parallel ranks, or use zero_stage 1",
         what, train.zero_stage(), num_ranks - idle);
  }
  return fmt::format("{}; {} would be as fast", what, num_ranks - idle);
}

std::string warning_of_nodes(const configs::Config& config,
                             const std::vector<std::string>& host_of_rank) {
  const int ranks_per_node = config.mesh().ranks_per_node();
  const std::size_t size = host_of_rank.size();
  std::size_t on_host = 1;  // the ranks of each host, if these are adjacent and equally many
  while (on_host < size && host_of_rank[on_host] == host_of_rank[0]) ++on_host;
  const auto has_nodes_of = [&](std::size_t ranks) {
    for (std::size_t rank = 0; rank < size; ++rank) {
      if (host_of_rank[rank] != host_of_rank[rank - rank % ranks]) return false;
    }
    return true;
  };
  if (ranks_per_node == 0) {
    if (config.train().invariant().shards() > 0) return "";  // whose sums have one level
    if (on_host == 1 || on_host == size || size % on_host != 0 || !has_nodes_of(on_host)) {
      return "";
    }
    return fmt::format(
        "each of the {} hosts sends its gradients {} times: set mesh.ranks_per_node: {} to add "
        "them inside hosts first (this changes the order of sums)",
        size / on_host, on_host, on_host);
  }
  const auto ranks = static_cast<std::size_t>(ranks_per_node);
  if (ranks == 1 || ranks == size) {
    return fmt::format("mesh.ranks_per_node: {} has no effect with {}", ranks_per_node,
                       counted(static_cast<std::int64_t>(size), "rank"));
  }
  if (!has_nodes_of(ranks)) {
    return fmt::format(
        "mesh.ranks_per_node: {}, but the ranks of a node are on several hosts: sums inside nodes "
        "also go over the network",
        ranks_per_node);
  }
  return "";
}

std::string warning_of_replicas(const configs::Config& config,
                                const std::vector<std::string>& host_of_rank) {
  const auto tensor = static_cast<std::size_t>(config.mesh().tensor());
  for (std::size_t rank = 0; rank < host_of_rank.size(); ++rank) {
    const std::size_t first = rank - rank % tensor;
    if (host_of_rank[rank] == host_of_rank[first]) continue;
    return fmt::format(
        "mesh.tensor: {}: ranks {} and {} hold parts of one model on two hosts, {} and {}: each "
        "layer waits for the network; start a multiple of {} ranks on each host",
        tensor, first, rank, host_of_rank[first], host_of_rank[rank], tensor);
  }
  return "";
}

std::string warning_of_precision(const configs::Config& config) {
  if (config.device() != configs::Config::cpu) return "";
  const bool has_avx512 = instruction_set() >= InstructionSet::kAvx512;
  switch (config.train().precision()) {
    case configs::Train::fp16:
      return fmt::format(
          "train.precision: fp16 is many times slower than fp32 on CPUs, which multiply it in "
          "software; {} is the fast choice",
          has_avx512 ? "bf16" : "fp32");
    case configs::Train::bf16:
      return has_avx512 ? ""
                        : "train.precision: bf16 is many times slower than fp32 without AVX-512, "
                          "which this CPU lacks or BIRKHOFF_CPU excludes; fp32 is the fast choice";
    default:
      return "";
  }
}

void warn_of_other_losses(const configs::Config& before, const configs::Config& now) {
  if (evaluated_data(before) == evaluated_data(now)) return;
  std::string effect;
  if (now.checkpoint().keep_best())
    effect += "; checkpoint.keep_best keeps the best checkpoint of each";
  if (now.evaluate().patience() > 0) effect += "; evaluate.patience counts from here";
  if (effect.empty()) return;
  log_warning("evaluations change ({} -> {}), so losses before and after do not compare{}",
              evaluated_data(before), evaluated_data(now), effect);
}

void check_evaluation(const configs::Config& config, const Corpus& corpus) {
  const configs::Evaluate& what = config.evaluate();
  if (what.patience() == 0 || corpus.has_split(what.split())) return;
  fail(
      ExitCode::kConfig,
      "evaluate.patience: {} has no effect: {} has no split \"{}\" (evaluate.split); leave it out, "
      "or evaluate another split",
      what.patience(), corpus.folder().string(), what.split());
}

void warn_of_rate_jump(const configs::Train& before, const configs::Train& now,
                       std::int64_t next_step, std::int64_t epoch) {
  const double expected = learning_rate(before.schedule(), next_step, before.steps(), epoch);
  const double rate = learning_rate(now.schedule(), next_step, now.steps(), epoch);
  constexpr double kSmallChange = 0.01;
  if (std::abs(rate - expected) <= kSmallChange * std::max(rate, expected)) return;
  log_warning(
      "the learning rate jumps: step {} has {}, and had {} with the train.schedule and train.steps "
      "of the checkpoint",
      next_step, plain_text(static_cast<float>(rate)), plain_text(static_cast<float>(expected)));
}

}  // namespace birkhoff
