#include <signal.h>

#include <nlohmann/json.hpp>
#include <ostream>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "cluster/base/text/plural.h"
#include "launcher/commands.h"
#include "launcher/commands/progress_lines.h"
#include "launcher/decoding/line_generator.h"
#include "launcher/decoding/lines_on_ranks.h"
#include "launcher/output.h"
#include "launcher/runs/run_paths.h"

namespace birkhoff {
namespace {

// Padded ids in a batch: beyond a few thousand, larger batches are hardly faster.
constexpr std::int64_t kMaxBatchTokens = 16384;

SearchOptions options_of(const GenerateArguments& arguments) {
  SearchOptions options;
  if (arguments.temperature) {
    options.sampling = Sampling{.temperature = *arguments.temperature,
                                .top_k = arguments.top_k,
                                .top_p = arguments.top_p,
                                .seed = static_cast<std::uint64_t>(arguments.seed)};
  } else {
    options.beam = arguments.beam;
    options.length_penalty = arguments.length_penalty;
    options.length_offset = arguments.length_offset;
  }
  check_search(options);
  return options;
}

// The arguments as a command line, without --ranks.
std::vector<std::string> command_line(const GenerateArguments& arguments) {
  std::vector<std::string> line = {"generate", arguments.path,
                                   "--input",  arguments.input,
                                   "--batch",  std::to_string(arguments.batch),
                                   "--device", arguments.device};
  const auto add = [&](const char* option, const std::string& value) {
    line.emplace_back(option);
    line.push_back(value);
  };
  if (arguments.temperature) {
    add("--temperature", fmt::format("{}", *arguments.temperature));
    add("--top-k", std::to_string(arguments.top_k));
    add("--top-p", fmt::format("{}", arguments.top_p));
    add("--seed", std::to_string(arguments.seed));
  } else {
    add("--beam", std::to_string(arguments.beam));
    add("--length-penalty", fmt::format("{}", arguments.length_penalty));
    add("--length-offset", fmt::format("{}", arguments.length_offset));
  }
  if (arguments.max_tokens) add("--max-tokens", std::to_string(*arguments.max_tokens));
  if (arguments.output != "-") add("--out", arguments.output);
  if (arguments.json) line.emplace_back("--json");
  return line;
}

// A text on one line: line ends inside it become \n and \r.
std::string on_one_line(const std::string& text) {
  std::string line;
  for (const char c : text) {
    if (c == '\n' || c == '\r') {
      line += c == '\n' ? "\\n" : "\\r";
    } else {
      line += c;
    }
  }
  return line;
}

// The lines that a command prints for generated sequences.
class SequencePrinter {
 public:
  SequencePrinter(const CheckpointFolder& checkpoint, bool json)
      : tokenizer_(tokenizer_of(checkpoint)), json_(json) {
    if (checkpoint.manifest.has_end_of_document())
      end_mark_ = static_cast<std::int32_t>(checkpoint.manifest.end_of_document());
  }

  std::string line(FoundSequence found) const {
    const bool ended = !found.ids.empty() && found.ids.back() == end_mark_;
    const std::size_t num_tokens = found.ids.size();
    if (ended) found.ids.pop_back();
    const std::string text = tokenizer_->decode(found.ids);
    if (!json_) return on_one_line(text);
    const nlohmann::ordered_json object = {{"text", text},
                                           {"tokens", num_tokens},
                                           {"ended", ended},
                                           {"log_probability", found.log_probability},
                                           {"score", found.score}};
    return object.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  }

 private:
  std::unique_ptr<Tokenizer> tokenizer_;
  bool json_;
  std::optional<std::int32_t> end_mark_;
};

void generate_lines(const GenerateArguments& arguments, ProcessGroup& world, at::Device device,
                    const std::function<void()>& tick,
                    const std::function<void(const std::string&)>& print, std::ostream& err) {
  const bool speaks = world.rank() == 0;
  const CheckpointFolder checkpoint = agreed_checkpoint(arguments.path, world);
  const std::unique_ptr<Model> model = load_model(checkpoint, device);
  for (const std::string& warning : model->warnings()) {
    if (speaks) err << "birkhoff: warning: " << warning << '\n';
  }
  const std::unique_ptr<LineGenerator> generator = make_line_generator(
      checkpoint, arguments.path, *model, options_of(arguments), arguments.max_tokens);
  const SequencePrinter printer(checkpoint, arguments.json);

  std::optional<ProgressLines> progress;
  if (speaks) progress.emplace(err);
  std::int64_t num_done = 0;  // lines of earlier rounds
  const auto generate_round = [&](const std::vector<TextLine>& lines) {
    std::vector<std::vector<std::int32_t>> sources;
    std::vector<std::int64_t> lengths;
    for (const TextLine& line : lines) {
      sources.push_back(generator->encode(line));
      lengths.push_back(std::ssize(sources.back()));
    }
    const Batches batches = batches_by_length(lengths, arguments.batch, kMaxBatchTokens,
                                              generator->needs_equal_lengths());
    const auto generate_batch = [&](const std::vector<std::size_t>& batch) {
      std::vector<std::vector<std::int32_t>> of_batch;
      std::vector<std::uint64_t> numbers;
      for (const std::size_t item : batch) {
        of_batch.push_back(sources[item]);
        numbers.push_back(static_cast<std::uint64_t>(lines[item].number));
      }
      std::vector<std::string> printed;
      for (FoundSequence& found : generator->generate(of_batch, numbers))
        printed.push_back(printer.line(std::move(found)));
      return printed;
    };
    const auto show = [&](std::int64_t done) {
      tick();
      if (!progress) return;
      const std::int64_t of_all = std::min(done * world.size(), std::ssize(lines));
      progress->show(fmt::format("generate: {} of the {} read so far", num_done + of_all,
                                 counted(num_done + std::ssize(lines), "line")));
    };
    std::vector<std::string> results = compute_on_ranks(world, batches, generate_batch, show);
    num_done += std::ssize(lines);
    return results;
  };
  transform_lines(arguments.input, world, print, generate_round);
  if (const std::string cut = generator->cut_lines(); speaks && !cut.empty())
    err << "birkhoff: warning: " << cut << '\n';
}

}  // namespace

int generate_command(const GenerateArguments& arguments, std::ostream& out, std::ostream& err) {
  signal(SIGPIPE, SIG_DFL);  // when the reader of a pipe has left, end without a message
  options_of(arguments);
  const RanksOfCommand where{.ranks = arguments.ranks,
                             .device = arguments.device,
                             .command_line = command_line(arguments),
                             .model = arguments.path,
                             .input = arguments.input,
                             .stopped = "later lines were not generated"};
  const auto body = [&](ProcessGroup& world, at::Device device, const std::function<void()>& tick) {
    if (arguments.output == "-" || world.rank() != 0) {
      const auto print = [&](const std::string& text) {
        out << text;
        flush_output(out);
      };
      generate_lines(arguments, world, device, tick, print, err);
      return;
    }
    write_file_durably(arguments.output, [&](File& file) {
      const auto print = [&](const std::string& text) { file.write_all(text); };
      generate_lines(arguments, world, device, tick, print, err);
    });
  };
  return run_on_ranks(where, body, err);
}

}  // namespace birkhoff
