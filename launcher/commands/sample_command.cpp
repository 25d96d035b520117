#include <fmt/core.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <ostream>
#include <ranges>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "cluster/base/text/plural.h"
#include "cluster/world.h"
#include "configs/schema/checkpoint_manifest.pb.h"
#include "data/tokenizers/text_decoder.h"
#include "launcher/commands.h"
#include "launcher/commands/sample_images.h"
#include "launcher/output.h"
#include "launcher/runs/model_ranks.h"
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

// The arguments as a command line.
std::vector<std::string> command_line(const SampleArguments& arguments) {
  std::vector<std::string> line = {"sample",        arguments.path,
                                   "--device",      arguments.device,
                                   "--tensor",      std::to_string(arguments.tensor),
                                   "--samples",     std::to_string(arguments.samples),
                                   "--temperature", fmt::format("{}", arguments.temperature),
                                   "--top-k",       std::to_string(arguments.top_k),
                                   "--top-p",       fmt::format("{}", arguments.top_p),
                                   "--seed",        std::to_string(arguments.seed)};
  const auto add = [&](const char* option, const std::string& value) {
    line.emplace_back(option);
    line.push_back(value);
  };
  if (arguments.prompt) add("--prompt", *arguments.prompt);
  if (!arguments.prompt_file.empty()) add("--prompt-file", arguments.prompt_file);
  if (arguments.tokens) add("--tokens", std::to_string(*arguments.tokens));
  if (!arguments.png.empty()) add("--png", arguments.png);
  if (arguments.complete) {
    add("--complete", fmt::format("{}", *arguments.complete));
    add("--split", arguments.split);
    if (!arguments.corpus.empty()) add("--corpus", arguments.corpus);
  }
  return line;
}

// All ranks generate the same; rank 0 prints. Collective over the world.
void sample(const SampleArguments& arguments, const ModelRank& rank, std::ostream& out,
            std::ostream& err) {
  const bool speaks = rank.world.rank() == 0;
  const CheckpointFolder checkpoint = agreed_checkpoint(arguments.path, rank.world);
  if (const auto image = model_inputs(checkpoint.manifest).image) {
    sample_images(arguments, checkpoint, *image, rank, out, err);
    return;
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
  // Read once: it may be a pipe.
  const std::string prompt =
      rank.world.broadcast_bytes(speaks ? prompt_of(arguments) : "", 0, "prompt");
  const std::vector<std::int32_t> prompt_ids = tokenizer->encode(prompt);
  if (prompt_ids.empty() && !checkpoint.manifest.has_end_of_document()) {
    fail(ExitCode::kUsage,
         "the prompt is empty, and a model that was trained on a single document has no end mark "
         "to start from: give a prompt, for instance a newline");
  }
  const std::unique_ptr<Model> loaded = load_model(checkpoint, rank.place);
  std::vector<std::string> warnings = loaded->warnings();
  Decoder* model = loaded->decoder();
  if (model == nullptr) {
    const char* const cure =
        loaded->source_decoder() == nullptr ? "" : "; translate lines with `birkhoff generate`";
    fail(ExitCode::kUsage, "{}: a model of this task generates no text{}", arguments.path, cure);
  }
  if (const std::int64_t unread = unread_prompt_ids(*model, prompt_ids); unread > 0) {
    warnings.push_back(fmt::format(
        "the first {} of the prompt's {} tokens are not read: the model sees {} at most", unread,
        prompt_ids.size(), model->max_tokens()));
  }
  if (divides_next_word(*tokenizer, prompt, prompt_ids)) {
    warnings.emplace_back(
        "the prompt ends in a space, but a token of this model begins with the space before its "
        "word, so the text continues as after two spaces; leave the final space out");
  }
  for (const std::string& warning : warnings) {
    if (speaks) err << "birkhoff: warning: " << warning << '\n';
  }

  const bool terminal = output_is_terminal();
  const auto print = [&](const std::string& text) {
    if (text.empty() || !speaks) return;
    out << (terminal ? terminal_text(text) : text);
    flush_output(out);
  };
  std::optional<LineEndOnInterrupt> line_end;
  if (rank.world.size() == 1) line_end.emplace();
  for (std::int64_t n = 0; n < arguments.samples; ++n) {
    if (n > 0) print(kBetweenTexts);
    print(prompt);
    options.text = static_cast<std::uint64_t>(n);
    TextDecoder decoder(*tokenizer, prompt_ids);
    generate(*model, prompt_ids, options, [&](std::int32_t id) {
      rank.tick();
      print(decoder.add(id));
    });
    print(decoder.finish() + '\n');
  }
}

}  // namespace

int sample_command(const SampleArguments& arguments, std::ostream& out, std::ostream& err) {
  signal(SIGPIPE, SIG_DFL);  // when the reader of a pipe has left, end without a message
  const auto body = [&](const ModelRank& rank) { sample(arguments, rank, out, err); };
  if (arguments.tensor == 1) {  // whatever has started this process
    run_alone(arguments.device, body);
    return 0;
  }
  const int announced = announced_ranks();
  const auto check = [&] {
    if (announced > 1 && announced != arguments.tensor) {
      fail(ExitCode::kUsage,
           "--tensor {}: the model is divided over all ranks that were started, and these are {}; "
           "start {}, or set --tensor {}",
           arguments.tensor, announced, arguments.tensor, announced);
    }
    if (arguments.prompt_file == "-") {
      fail(ExitCode::kUsage,
           "--prompt-file -: standard input is read by one process; leave --tensor out, or name a "
           "file");
    }
  };
  std::optional<int> ranks;  // to start
  const bool by_mpirun = std::getenv("OMPI_COMM_WORLD_SIZE") != nullptr;
  if (announced == 1 && !by_mpirun) ranks = arguments.tensor;
  return run_on_ranks({.ranks = ranks,
                       .tensor = arguments.tensor,
                       .device = arguments.device,
                       .command_line = command_line(arguments),
                       .model = arguments.path,
                       .check = check,
                       .stopped = "the text is not complete"},
                      body, err);
}

}  // namespace birkhoff
