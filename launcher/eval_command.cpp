#include <fmt/core.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>

#include "cluster/base/cpu.h"
#include "data/loader.h"
#include "launcher/commands.h"
#include "launcher/model_tokenizer.h"
#include "launcher/ranks.h"
#include "launcher/run_paths.h"
#include "launcher/text_corpus.h"
#include "runtime/evaluator.h"

namespace birkhoff {

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

  LoaderOptions options;
  options.split = split;
  options.stream = config.task().language_model().stream();
  options.sequence_length = config.data().sequence_length();
  options.restart_at_documents = config.data().restart_at_documents();
  EvalReader reader(corpus, options);
  configs::Evaluate plan_config = config.evaluate();
  plan_config.set_split(split);
  plan_config.set_sequences(0);
  const EvaluationPlan plan = plan_evaluation(corpus, plan_config, options.stream,
                                              options.sequence_length, reader.num_windows());
  Evaluator evaluator(
      *loaded.model, *loaded.single, plan,
      [&reader](std::int64_t begin, std::int64_t end) { return reader.read(begin, end); });
  const Evaluation result = evaluator.run();
  const std::string& evaluated = text ? arguments.text : split;
  if (arguments.json) {
    const nlohmann::ordered_json object = {{"checkpoint", checkpoint.path.string()},
                                           {"step", manifest.step()},
                                           {text ? "text" : "split", evaluated},
                                           {"loss", result.loss},
                                           {"bits_per_byte", result.bits_per_byte},
                                           {"tokens", result.tokens},
                                           {"bytes", result.bytes}};
    out << object.dump() << '\n';
  } else {
    out << fmt::format(
        "step {}, {}: loss {:.4f} nats per token, {:.4f} bits per byte, {} tokens, {} bytes\n",
        manifest.step(), evaluated, result.loss, result.bits_per_byte, result.tokens, result.bytes);
  }
  return 0;
}

}  // namespace birkhoff
