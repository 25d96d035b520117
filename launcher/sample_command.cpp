#include <ATen/Parallel.h>

#include <ostream>

#include "cluster/base/error.h"
#include "configs/checkpoint_manifest.pb.h"
#include "launcher/commands.h"
#include "launcher/ranks.h"
#include "launcher/run_paths.h"
#include "runtime/generator.h"

namespace birkhoff {

int sample_command(const SampleArguments& arguments, std::ostream& out, std::ostream& err) {
  at::set_num_threads(threads_of_rank(/*local_ranks=*/1));
  const CheckpointFolder checkpoint = checkpoint_of(arguments.path);
  const std::unique_ptr<Tokenizer> tokenizer = tokenizer_of(checkpoint);
  LoadedModel loaded = load_model(checkpoint, device_named(arguments.device));
  for (const std::string& warning : loaded.model->warnings())
    err << "birkhoff: warning: " << warning << '\n';
  GenerateOptions options;
  options.tokens = arguments.tokens;
  options.temperature = arguments.temperature;
  options.top_k = arguments.top_k;
  options.seed = static_cast<std::uint64_t>(arguments.seed);
  options.first = static_cast<std::int32_t>(checkpoint.manifest.end_of_document());
  if (checkpoint.manifest.config().data().restart_at_documents() &&
      checkpoint.manifest.has_end_of_document()) {
    options.restart_after = options.first;
  }
  const std::vector<std::int32_t> prompt = tokenizer->encode(arguments.prompt);
  if (const std::int64_t unread = unread_prompt_ids(*loaded.model, prompt); unread > 0) {
    err << "birkhoff: warning: the first " << unread << " of the prompt's " << prompt.size()
        << " tokens are not read: the model sees data.sequence_length = "
        << loaded.model->max_tokens() << " at most\n";
  }
  const std::vector<std::int32_t> text = generate(*loaded.model, prompt, options);
  out << arguments.prompt << tokenizer->decode(text) << '\n';
  return 0;
}

}  // namespace birkhoff
