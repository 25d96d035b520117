#include <ATen/Parallel.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <ostream>
#include <ranges>

#include "cluster/base/cpu.h"
#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "configs/schema/checkpoint_manifest.pb.h"
#include "data/tokenizers/text_decoder.h"
#include "launcher/commands.h"
#include "launcher/commands/sample_images.h"
#include "launcher/output.h"
#include "launcher/processes/ranks.h"
#include "launcher/runs/run_paths.h"
#include "runtime/decoding/generator.h"

namespace birkhoff {
namespace {

constexpr std::int64_t kPromptMaxBytes = 64 << 20;
constexpr char kBetweenTexts[] = "---------------\n";

// While this object exists, Ctrl-C ends the line that is being printed and then the program, as it
// would without this object. The text that was generated is already printed.
class LineEndOnInterrupt {
 public:
  LineEndOnInterrupt() {
    sigaction(SIGINT, nullptr, &before_);
    if (before_.sa_handler == SIG_IGN) return;  // nohup, a background job
    struct sigaction action {};
    action.sa_handler = [](int signal) {
      [[maybe_unused]] const ssize_t written = write(STDOUT_FILENO, "\n", 1);
      raise(signal);
    };
    // A second signal, or the raised one, finds no handler.
    action.sa_flags = static_cast<int>(SA_RESETHAND | SA_NODEFER);
    sigaction(SIGINT, &action, nullptr);
  }
  ~LineEndOnInterrupt() { sigaction(SIGINT, &before_, nullptr); }
  LineEndOnInterrupt(const LineEndOnInterrupt&) = delete;
  LineEndOnInterrupt& operator=(const LineEndOnInterrupt&) = delete;

 private:
  struct sigaction before_ {};
};

std::string prompt_of(const SampleArguments& arguments) {
  if (arguments.prompt_file.empty()) return arguments.prompt.value_or("");
  if (arguments.prompt_file == "-") return read_standard_input(kPromptMaxBytes);
  return read_stream(arguments.prompt_file, kPromptMaxBytes, ExitCode::kUsage);
}

GenerateOptions options_of(const SampleArguments& arguments,
                           const configs::CheckpointManifest& manifest) {
  GenerateOptions options;
  constexpr std::int64_t kDefaultTokens = 200;
  options.tokens = arguments.tokens.value_or(kDefaultTokens);
  options.sampling = {.temperature = arguments.temperature,
                      .top_k = arguments.top_k,
                      .top_p = arguments.top_p,
                      .seed = static_cast<std::uint64_t>(arguments.seed)};
  if (manifest.has_end_of_document()) {
    options.end_mark = static_cast<std::int32_t>(manifest.end_of_document());
    options.restarts = manifest.config().data().restart_at_documents();
  }
  check_options(options);
  return options;
}

// Whether the tokenizer joins the prompt's final space to a word behind it. The prompt's ids are
// then not the first ids of a longer text, here of the prompt and its first word.
bool divides_next_word(const Tokenizer& tokenizer, const std::string& prompt,
                       const std::vector<std::int32_t>& prompt_ids) {
  const std::size_t begin = prompt.find_first_not_of(' ');
  if (!prompt.ends_with(' ') || begin == std::string::npos) return false;
  const std::string word = prompt.substr(begin, prompt.find(' ', begin) - begin);
  const std::vector<std::int32_t> longer = tokenizer.encode(prompt + word);
  return !std::ranges::equal(prompt_ids, longer | std::views::take(prompt_ids.size()));
}

}  // namespace

int sample_command(const SampleArguments& arguments, std::ostream& out, std::ostream& err) {
  signal(SIGPIPE, SIG_DFL);  // when the reader of a pipe has left, end without a message
  at::set_num_threads(threads_of_rank(usable_cores()));
  const CheckpointFolder checkpoint = checkpoint_of(arguments.path);
  if (const auto image = model_inputs(checkpoint.manifest).image) {
    return sample_images(arguments, checkpoint, *image, out, err);
  }
  if (!arguments.png.empty()) {
    if (checkpoint.manifest.tokenizer().empty()) {
      fail(ExitCode::kUsage, "{}: a model of this task generates no images", arguments.path);
    }
    fail(ExitCode::kUsage, "--png {}: the model generates text; give --prompt instead",
         arguments.png);
  }
  GenerateOptions options = options_of(arguments, checkpoint.manifest);
  const std::unique_ptr<Tokenizer> tokenizer = tokenizer_of(checkpoint);
  const std::string prompt = prompt_of(arguments);
  const std::vector<std::int32_t> prompt_ids = tokenizer->encode(prompt);
  if (prompt_ids.empty() && !checkpoint.manifest.has_end_of_document()) {
    fail(ExitCode::kUsage,
         "the prompt is empty, and a model that was trained on a single document has no end mark "
         "to start from: give a prompt, for instance a newline");
  }
  const std::unique_ptr<Model> loaded = load_model(checkpoint, device_named(arguments.device));
  for (const std::string& warning : loaded->warnings())
    err << "birkhoff: warning: " << warning << '\n';
  Decoder* model = loaded->decoder();
  if (model == nullptr) {
    const char* const cure =
        loaded->source_decoder() == nullptr ? "" : "; translate lines with `birkhoff generate`";
    fail(ExitCode::kUsage, "{}: a model of this task generates no text{}", arguments.path, cure);
  }
  if (const std::int64_t unread = unread_prompt_ids(*model, prompt_ids); unread > 0) {
    err << "birkhoff: warning: the first " << unread << " of the prompt's " << prompt_ids.size()
        << " tokens are not read: the model sees " << model->max_tokens() << " at most\n";
  }

  if (divides_next_word(*tokenizer, prompt, prompt_ids)) {
    err << "birkhoff: warning: the prompt ends in a space, but a token of this model begins with "
           "the space before its word, so the text continues as after two spaces; leave the "
           "final space out\n";
  }

  const bool terminal = isatty(STDOUT_FILENO) != 0;
  const auto print = [&](const std::string& text) {
    if (text.empty()) return;
    out << (terminal ? terminal_text(text) : text);
    flush_output(out);
  };
  const LineEndOnInterrupt line_end;
  for (std::int64_t n = 0; n < arguments.samples; ++n) {
    if (n > 0) print(kBetweenTexts);
    print(prompt);
    options.text = static_cast<std::uint64_t>(n);
    TextDecoder decoder(*tokenizer, prompt_ids);
    generate(*model, prompt_ids, options, [&](std::int32_t id) { print(decoder.add(id)); });
    print(decoder.finish() + '\n');
  }
  return 0;
}

}  // namespace birkhoff
