#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>

#include "cluster/base/cpu.h"
#include "data/corpus/corpus.h"
#include "launcher/commands.h"
#include "launcher/commands/model_tokenizer.h"
#include "launcher/commands/progress_lines.h"
#include "launcher/commands/run_paths.h"
#include "launcher/commands/text_corpus.h"
#include "launcher/processes/ranks.h"
#include "runtime/evaluator.h"
#include "runtime/reporting/progress.h"

namespace birkhoff {
namespace {

// Runs the evaluator and shows a line of progress.
Evaluation evaluate_shown(Evaluator& evaluator, const std::string& evaluated, std::ostream& err) {
  using Clock = std::chrono::steady_clock;
  const EvaluationPlan& plan = evaluator.plan();
  const Clock::time_point start = Clock::now();
  std::int64_t done = 0;
  ProgressLines lines(err);
  return evaluator.run([&] {
    done = std::min(done + plan.micro_batch, plan.num_windows);
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    const double left =
        seconds * static_cast<double>(plan.num_windows - done) / static_cast<double>(done);
    lines.show(fmt::format("eval: {}, {} of {} sequences, {} left", evaluated, done,
                           plan.num_windows, duration_text(left)));
  });
}

// The words of text that the counted targets stand for, like EvaluationPlan::bytes; 0 if the corpus
// does not count words.
double words_of(const EvaluationPlan& plan, const Corpus& corpus) {
  const configs::CorpusManifest::Counts& counts = corpus.split(plan.split).counts();
  return static_cast<double>(counts.words()) * plan.bytes / static_cast<double>(counts.bytes());
}

}  // namespace

int eval_command(const EvalArguments& arguments, std::ostream& out, std::ostream& err) {
  compute_on_cpu(threads_of_rank(/*local_ranks=*/1));
  const CheckpointFolder checkpoint = checkpoint_of(arguments.path);
  const configs::CheckpointManifest& manifest = checkpoint.manifest;
  const configs::Config& config = manifest.config();
  std::optional<TextCorpus> text;
  if (!arguments.text.empty()) text.emplace(tokenizer_source(checkpoint), arguments.text, err);
  const std::string split = text ? TextCorpus::kSplit : arguments.split;
  const Corpus corpus(text                       ? text->folder().string()
                      : arguments.corpus.empty() ? config.data().corpus()
                                                 : arguments.corpus);
  require_same_tokenizer(checkpoint, arguments.path, corpus);
  LoadedModel loaded = load_model(checkpoint, device_named(arguments.device));
  for (const std::string& warning : loaded.model->warnings())
    err << "birkhoff: warning: " << warning << '\n';

  configs::Evaluate what = config.evaluate();
  what.set_split(split);
  what.set_sequences(arguments.sequences);
  const std::unique_ptr<Evaluator> evaluator =
      make_evaluator(config, what, corpus, *loaded.model, *loaded.single);
  const EvaluationPlan& plan = evaluator->plan();
  const std::string& evaluated = text ? arguments.text : split;
  const Evaluation result = evaluate_shown(*evaluator, evaluated, err);
  if (!std::isfinite(result.loss)) {
    fail(ExitCode::kNumerical,
         "{}: the loss on {} is not finite: the run had diverged; evaluate an earlier checkpoint",
         checkpoint.path.string(), evaluated);
  }
  const double words = words_of(plan, corpus);
  const double perplexity = std::exp(result.loss);
  const double word_perplexity = std::exp(result.loss * static_cast<double>(result.tokens) / words);
  if (arguments.json) {
    nlohmann::ordered_json object = {{"checkpoint", checkpoint.path.string()},
                                     {"step", manifest.step()},
                                     {text ? "text" : "split", evaluated},
                                     {"loss", result.loss},
                                     {"bits_per_byte", result.bits_per_byte},
                                     {"tokens", result.tokens},
                                     {"bytes", result.bytes},
                                     {"sequences", plan.num_windows},
                                     {"perplexity", perplexity}};
    if (words > 0) {
      object["words"] = std::llround(words);
      object["word_perplexity"] = word_perplexity;
    }
    out << object.dump() << '\n';
  } else {
    const std::string per_word =
        words > 0 ? fmt::format(" and {:.5g} per word", word_perplexity) : "";
    out << fmt::format(
        "step {}, {}: loss {:.4f} nats per token, {:.4f} bits per byte, perplexity {:.5g} per "
        "token{}, {} tokens, {} bytes, {} of {} sequences\n",
        manifest.step(), evaluated, result.loss, result.bits_per_byte, perplexity, per_word,
        result.tokens, result.bytes, plan.num_windows, plan.all_windows);
  }
  return 0;
}

}  // namespace birkhoff
