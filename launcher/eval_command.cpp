#include <fmt/core.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <ostream>

#include "cluster/base/cpu.h"
#include "cluster/base/error.h"
#include "configs/checkpoint_manifest.pb.h"
#include "data/loader.h"
#include "launcher/commands.h"
#include "launcher/ranks.h"
#include "launcher/run_paths.h"
#include "runtime/evaluator.h"

namespace birkhoff {
namespace {

// The ids must mean the same in the corpus and in the model.
void require_same_tokenizer(const configs::CheckpointManifest& checkpoint, const Corpus& corpus) {
  const configs::CorpusManifest::Tokenizer& tokenizer = corpus.manifest().tokenizer();
  std::string hash;
  for (const auto& file : checkpoint.file()) {
    if (!checkpoint.tokenizer_file().empty() && file.name() == checkpoint.tokenizer_file())
      hash = file.hash();
  }
  if (tokenizer.kind() != checkpoint.tokenizer() ||
      tokenizer.vocabulary() != checkpoint.vocabulary() || tokenizer.hash() != hash) {
    fail(ExitCode::kData,
         "{}: its tokenizer ({}, {} ids) is not the model's ({}, {} ids): prepare the text with "
         "the model's own tokenizer file",
         corpus.folder().string(), tokenizer.kind(), tokenizer.vocabulary(), checkpoint.tokenizer(),
         checkpoint.vocabulary());
  }
}

}  // namespace

int eval_command(const EvalArguments& arguments, std::ostream& out, std::ostream& err) {
  compute_on_cpu(threads_of_rank(/*local_ranks=*/1));
  const CheckpointFolder checkpoint = checkpoint_of(arguments.path);
  const configs::CheckpointManifest& manifest = checkpoint.manifest;
  const configs::Config& config = manifest.config();
  const Corpus corpus(arguments.corpus.empty() ? config.data().corpus() : arguments.corpus);
  require_same_tokenizer(manifest, corpus);
  LoadedModel loaded = load_model(checkpoint, device_named(arguments.device));
  for (const std::string& warning : loaded.model->warnings())
    err << "birkhoff: warning: " << warning << '\n';

  LoaderOptions options;
  options.split = arguments.split;
  options.stream = config.task().language_model().stream();
  options.sequence_length = config.data().sequence_length();
  options.restart_at_documents = config.data().restart_at_documents();
  EvalReader reader(corpus, options);
  configs::Evaluate plan_config = config.evaluate();
  plan_config.set_split(arguments.split);
  plan_config.set_sequences(0);
  const EvaluationPlan plan = plan_evaluation(corpus, plan_config, options.stream,
                                              options.sequence_length, reader.num_windows());
  Evaluator evaluator(
      *loaded.model, *loaded.single, plan,
      [&reader](std::int64_t begin, std::int64_t end) { return reader.read(begin, end); });
  const Evaluation result = evaluator.run();
  if (!std::isfinite(result.loss)) {
    fail(
        ExitCode::kNumerical,
        "{}: the loss on {} is not finite: the run had diverged; evaluate a checkpoint from before",
        checkpoint.path.string(), arguments.split);
  }
  if (arguments.json) {
    const nlohmann::ordered_json object = {{"checkpoint", checkpoint.path.string()},
                                           {"step", manifest.step()},
                                           {"split", arguments.split},
                                           {"loss", result.loss},
                                           {"bits_per_byte", result.bits_per_byte},
                                           {"tokens", result.tokens},
                                           {"bytes", result.bytes}};
    out << object.dump() << '\n';
  } else {
    out << fmt::format(
        "step {}, {}: loss {:.4f} nats per token, {:.4f} bits per byte, {} tokens, {} bytes\n",
        manifest.step(), arguments.split, result.loss, result.bits_per_byte, result.tokens,
        result.bytes);
  }
  return 0;
}

}  // namespace birkhoff
