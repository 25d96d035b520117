#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <ostream>

#include "cluster/base/error.h"
#include "cluster/base/text/plural.h"
#include "configs/loader/check.h"
#include "configs/loader/summary.h"
#include "data/corpus/corpus.h"
#include "data/corpus/verify.h"
#include "data/loader/bigram.h"
#include "data/loader/document_rows.h"
#include "launcher/commands.h"
#include "launcher/runs/run_paths.h"
#include "launcher/runs/run_summary.h"
#include "models/describe.h"
#include "runtime/checkpoint/commit.h"
#include "runtime/reporting/display_text.h"
#include "runtime/tasks/task.h"

namespace birkhoff {

namespace {

// "1.2345 at step 100".
template <typename Record>
std::string loss_at_step(const Record& record) {
  return record.step == 0 ? "-" : fmt::format("{} at step {}", loss_text(record.loss), record.step);
}

constexpr std::size_t kMaxJobs = 10;  // listed

// Describes the lengths of a labeled corpus's texts, or of sources and targets, a line for each
// stream of a split: training cuts long ones.
std::string describe_texts(const Corpus& corpus) {
  std::string text;
  for (const auto& split : corpus.manifest().split()) {
    const bool has_labels =
        std::any_of(split.record().begin(), split.record().end(),
                    [](const auto& record) { return record.class_name_size() > 0; });
    const bool has_pairs = split.stream_size() > 1;
    if (!has_labels && !has_pairs) continue;
    for (const auto& stream : split.stream()) {
      const auto lengths = document_lengths(corpus, split.name(), stream.name());
      if (lengths.empty()) continue;
      // The smallest length that this share of the texts does not exceed.
      const auto quantile = [&](double share) {
        const double wanted = share * static_cast<double>(stream.documents());
        std::int64_t count = 0;
        return std::find_if(lengths.begin(), lengths.end(),
                            [&](const auto& each) {
                              return static_cast<double>(count += each.second) >= wanted;
                            })
            ->first;
      };
      text += fmt::format(
          "{} of {}: half have at most {}, 99 % at most {}, the longest {}; training cuts those "
          "above {}\n",
          has_pairs ? stream.name() + "s" : "texts", split.name(), counted(quantile(0.5), "token"),
          quantile(0.99), lengths.rbegin()->first,
          stream.name() == "target" ? "task.translation.target_length" : "data.sequence_length");
    }
  }
  return text;
}

std::string describe_run(const RunSummary& run) {
  const configs::Config& config = run.config;
  const RunFigures figures = figures_of(run.records);
  std::string text;
  const auto line = [&text](const char* name, const std::string& what) {
    text += fmt::format("{:<12} {}\n", name, display_text(what));
  };
  line("run", run.folder.string());
  line("state",
       fmt::format("{}{}, step {} of {}", state_name(run.state),
                   run.holder ? " (" + *run.holder + ")" : "", run.step, config.train().steps()));
  line("layers", layers_text(config.model()));
  line("mechanism", attention_text(config.model()));
  line("optimizer", optimization_text(config.train()));
  const configs::Train& train = config.train();
  line("data", fmt::format("{}, sequences of {} tokens, {} per step", config.data().corpus(),
                           config.data().sequence_length(),
                           train.batch_tokens() > 0 ? counted(train.batch_tokens(), "token")
                                                    : fmt::format("{}", train.global_batch())));
  line("train loss", fmt::format("last {}, best {}", loss_at_step(figures.last_step),
                                 loss_at_step(figures.best_step)));
  const std::string& split = config.evaluate().split();
  line((split + " loss").c_str(),
       fmt::format("last {}, best {}", loss_at_step(figures.last_evaluation),
                   loss_at_step(figures.best_evaluation)));
  for (const auto& [name, value] : figures.last_evaluation.figures) {
    line(display_text(name).c_str(), loss_text(value));
  }
  line("time", time_text(figures.seconds) +
                   (figures.seconds_of_steps ? ", without evaluations and saves" : ""));
  line("speed", std::isnan(figures.step_ms)
                    ? "-"
                    : fmt::format("{} tokens/s, {:.1f} ms per step",
                                  whole_text(figures.tokens_per_second), figures.step_ms));
  std::vector<std::string> names;
  for (const std::int64_t step : run.checkpoints) names.push_back(step_name(step));
  line("checkpoints", names.empty() ? "none yet" : fmt::format("{}", fmt::join(names, ", ")));
  if (run.jobs.empty()) return text;
  line("history", history_text(run));
  const std::size_t first = run.jobs.size() - std::min(run.jobs.size(), kMaxJobs);
  if (first > 0) line("jobs", fmt::format("{} earlier ones are in history.jsonl", first));
  for (std::size_t i = first; i < run.jobs.size(); ++i) {
    line("job", job_text(run.jobs[i]));
    for (const SlowEpisode& episode : run.jobs[i].slow) {
      line("slow rank", fmt::format("{}, step {}: {}", local_time(episode.time), episode.slow.step,
                                    episode.slow.text()));
    }
  }
  return text;
}

// The operations of attention for which training takes a slower path than it could, a line for
// each.
std::string describe_attention(const CheckpointFolder& checkpoint) {
  const configs::Config config = config_of(checkpoint);
  const std::int64_t vocabulary = checkpoint.manifest.vocabulary();
  const std::unique_ptr<Task> task = make_task(config);
  std::vector<std::string> slow = slow_attention_paths(
      config, task->inputs(vocabulary), task->synthetic_batch(vocabulary, at::kMeta));
  const std::string device = configs::Config::Device_Name(config.device());
  if (slow.empty()) slow.push_back("the fastest path of " + device + " in all layers");
  std::string text;
  for (const std::string& line : slow) text += fmt::format("{:<12} {}\n", "attention", line);
  return text;
}

}  // namespace

int inspect_command(const InspectArguments& arguments, std::ostream& out, std::ostream&) {
  const PathKind kind = kind_of(arguments.path);
  if (kind != PathKind::kCorpus) {
    if (arguments.bigram)
      fail(ExitCode::kUsage, "--bigram is for a corpus, and {} is not one", arguments.path);
    if (kind == PathKind::kRun) {
      const RunSummary run = read_run(arguments.path);
      out << describe_run(run);
      if (run.checkpoints.empty()) return 0;
      out << '\n';
    }
    const CheckpointFolder checkpoint = checkpoint_of(arguments.path);
    const std::unique_ptr<Model> model = load_model(checkpoint, at::kCPU, ParameterValues::kAny);
    const std::string attention = describe_attention(checkpoint);  // before anything is printed
    out << describe_checkpoint(checkpoint) << attention
        << describe_model(*model, tokens_per_sample(checkpoint.manifest.config()));
    return 0;
  }
  const Corpus corpus(arguments.path);
  out << describe_corpus(corpus) << describe_texts(corpus);
  if (arguments.bigram) {
    const BigramFigures figures = bigram_figures(corpus, "valid");
    const auto bits =
        figures.targets.bits_per_byte(figures.loss * static_cast<double>(figures.tokens));
    out << fmt::format(
        "bigram model on valid: loss {:.4f} nats per token, {}, {} tokens\n", figures.loss,
        bits ? fmt::format("{:.4f} bits per byte, {} bytes", *bits, figures.targets.bytes)
             : "no bits per byte: " + figures.targets.no_bytes,
        figures.tokens);
  }
  return 0;
}

int verify_command(const std::string& path, std::ostream& out, std::ostream&) {
  if (kind_of(path) == PathKind::kCorpus) {
    verify_corpus(Corpus(path));
    out << path << ": corpus verified, every byte matches its hash\n";
    return 0;
  }
  for (const std::filesystem::path& folder : checkpoints_of(path)) {
    verify_checkpoint(open_checkpoint(folder));
    out << folder.string() << ": checkpoint verified, every byte matches its hash\n";
  }
  return 0;
}

}  // namespace birkhoff
