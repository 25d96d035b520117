#include <ATen/ops/sum.h>
#include <signal.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "cluster/base/text/plural.h"
#include "cluster/base/text/utf8.h"
#include "data/loader/sample_source.h"
#include "data/scores/bleu.h"
#include "data/scores/sequence_scores.h"
#include "launcher/commands.h"
#include "launcher/commands/model_tokenizer.h"
#include "launcher/commands/progress_lines.h"
#include "launcher/decoding/line_generator.h"
#include "launcher/decoding/lines_on_ranks.h"
#include "launcher/output.h"
#include "launcher/runs/model_ranks.h"
#include "launcher/runs/run_paths.h"
#include "runtime/decoding/likelihood.h"
#include "runtime/run_checks.h"
#include "runtime/tasks/task.h"

namespace birkhoff {
namespace {

// Padded ids in a batch: beyond a few thousand, larger batches are hardly faster.
constexpr std::int64_t kMaxBatchTokens = 16384;
// Sequences that are continued at a time, which is what a wide beam costs.
constexpr std::int64_t kMaxRows = 4096;

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
  std::vector<std::string> line = {
      "generate", arguments.path,   "--batch",  std::to_string(arguments.batch),
      "--device", arguments.device, "--tensor", std::to_string(arguments.tensor)};
  const auto add = [&](const char* option, const std::string& value) {
    line.emplace_back(option);
    line.push_back(value);
  };
  if (arguments.split.empty()) add("--input", arguments.input);
  if (arguments.temperature) {
    add("--temperature", fmt::format("{}", *arguments.temperature));
    add("--top-k", std::to_string(arguments.top_k));
    add("--top-p", fmt::format("{}", arguments.top_p));
    add("--seed", std::to_string(arguments.seed));
  } else if (!arguments.teacher_forced) {
    add("--beam", std::to_string(arguments.beam));
    add("--length-penalty", fmt::format("{}", arguments.length_penalty));
    add("--length-offset", fmt::format("{}", arguments.length_offset));
  }
  if (arguments.max_tokens) add("--max-tokens", std::to_string(*arguments.max_tokens));
  if (!arguments.split.empty()) {
    add("--split", arguments.split);
  }
  if (!arguments.corpus.empty()) add("--corpus", arguments.corpus);
  if (!arguments.score.empty()) {
    add("--score", arguments.score);
    add("--tokenize", arguments.tokenize);
  }
  if (arguments.teacher_forced) line.emplace_back("--teacher-forced");
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

  // The text of ids, without an end mark at their end.
  std::string text(std::vector<std::int32_t> ids) const {
    if (ended(ids)) ids.pop_back();
    return tokenizer_->decode(ids);
  }
  std::string line(const FoundSequence& found) const {
    if (!json_) return on_one_line(text(found.ids));
    const nlohmann::ordered_json object = {{"text", text(found.ids)},
                                           {"tokens", found.ids.size()},
                                           {"ended", ended(found.ids)},
                                           {"log_probability", found.log_probability},
                                           {"score", found.score}};
    return object.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  }

 private:
  bool ended(const std::vector<std::int32_t>& ids) const {
    return !ids.empty() && ids.back() == end_mark_;
  }

  std::unique_ptr<Tokenizer> tokenizer_;
  bool json_;
  std::optional<std::int32_t> end_mark_;
};

// Sequences as bytes, for compute_on_ranks().
std::string bytes_of(const FoundSequence& found) {
  std::string bytes(reinterpret_cast<const char*>(&found.log_probability), sizeof(double));
  bytes.append(reinterpret_cast<const char*>(&found.score), sizeof(double));
  return bytes.append(reinterpret_cast<const char*>(found.ids.data()),
                      found.ids.size() * sizeof found.ids[0]);
}

FoundSequence sequence_of(const std::string& bytes) {
  FoundSequence found;
  constexpr std::size_t kScores = 2 * sizeof(double);
  found.ids.resize((bytes.size() - kScores) / sizeof found.ids[0]);
  std::memcpy(&found.log_probability, bytes.data(), sizeof(double));
  std::memcpy(&found.score, bytes.data() + sizeof(double), sizeof(double));
  std::memcpy(found.ids.data(), bytes.data() + kScores, bytes.size() - kScores);
  return found;
}

// A model that generates on ranks. All functions are collective over the world.
class Generation {
 public:
  Generation(const GenerateArguments& arguments, const ModelRank& rank, std::ostream& err)
      : checkpoint(agreed_checkpoint(arguments.path, rank.world)),
        printer(checkpoint, arguments.json),
        arguments_(arguments),
        rank_(rank),
        err_(err),
        model_(load_model(checkpoint, rank.place)),
        generator_(make_line_generator(checkpoint, arguments.path, *model_, options_of(arguments),
                                       arguments.max_tokens)) {
    if (rank_.world.rank() != 0) return;
    for (const std::string& warning : model_->warnings())
      err << "birkhoff: warning: " << warning << '\n';
    progress_.emplace(err);
  }

  std::vector<std::string> lines_for(const std::vector<TextLine>& lines) {
    std::vector<std::vector<std::int32_t>> sources;
    check_on_rank_0_first(rank_.world, [&] {
      for (const TextLine& line : lines) sources.push_back(generator_->encode(line));
    });
    std::vector<std::string> printed;
    for (const FoundSequence& found : sequences_for(sources))
      printed.push_back(printer.line(found));
    return printed;
  }

  // The likeliest ids in place of those of the references, each after the true ones before it. The
  // sources follow those of earlier calls.
  std::vector<FoundSequence> predictions_for(
      const std::vector<std::vector<std::int32_t>>& sources,
      const std::vector<std::vector<std::int32_t>>& references) {
    const auto end_mark = static_cast<std::int32_t>(checkpoint.manifest.end_of_document());
    std::vector<ScoredTokens> pairs;
    std::vector<std::int64_t> lengths;
    for (std::size_t i = 0; i < sources.size(); ++i) {
      ScoredTokens pair{
          .ids = {end_mark}, .num_counted = std::ssize(references[i]), .source = sources[i]};
      pair.ids.insert(pair.ids.end(), references[i].begin(), references[i].end());
      lengths.push_back(std::max(std::ssize(pair.ids), std::ssize(pair.source)));
      pairs.push_back(std::move(pair));
    }
    const auto predict_batch = [&](const std::vector<std::size_t>& batch) {
      std::vector<ScoredTokens> of_batch;
      for (const std::size_t item : batch) of_batch.push_back(pairs[item]);
      std::vector<std::string> results;
      for (auto& ids : likeliest_tokens(*model_->token_scorer(), of_batch))
        results.push_back(bytes_of({.ids = std::move(ids)}));
      return results;
    };
    return compute(batches_by_length(lengths, arguments_.batch,
                                     kMaxBatchLogits / checkpoint.manifest.vocabulary()),
                   std::ssize(sources), predict_batch);
  }

  // The sources follow those of earlier calls.
  std::vector<FoundSequence> sequences_for(const std::vector<std::vector<std::int32_t>>& sources) {
    std::vector<std::int64_t> lengths;
    for (const auto& source : sources) lengths.push_back(std::ssize(source));
    const Batches batches = batches_by_length(
        lengths, std::max<std::int64_t>(1, std::min(arguments_.batch, kMaxRows / arguments_.beam)),
        kMaxBatchTokens, generator_->needs_equal_lengths());
    const auto generate_batch = [&](const std::vector<std::size_t>& batch) {
      std::vector<std::vector<std::int32_t>> of_batch;
      std::vector<std::uint64_t> numbers;
      for (const std::size_t item : batch) {
        of_batch.push_back(sources[item]);
        numbers.push_back(static_cast<std::uint64_t>(num_done_) + item);
      }
      std::vector<std::string> results;
      for (const FoundSequence& found : generator_->generate(of_batch, numbers))
        results.push_back(bytes_of(found));
      return results;
    };
    return compute(batches, std::ssize(sources), generate_batch);
  }

  void warn_of_cut_lines() const {
    if (const std::string cut = generator_->cut_lines(); rank_.world.rank() == 0 && !cut.empty())
      err_ << "birkhoff: warning: " << cut << '\n';
  }

  const CheckpointFolder checkpoint;
  const SequencePrinter printer;

 private:
  // Computes the sequences of the lines on ranks. of_batch returns bytes_of() each sequence of a
  // batch.
  template <typename OfBatch>
  std::vector<FoundSequence> compute(const Batches& batches, std::int64_t num_lines,
                                     const OfBatch& of_batch) {
    const auto show = [&](std::int64_t done) {
      rank_.tick();
      if (!progress_) return;
      const std::int64_t of_all = std::min(done * rank_.data.size(), num_lines);
      progress_->show(fmt::format("generate: {} of the {} read so far", num_done_ + of_all,
                                  counted(num_done_ + num_lines, "line")));
    };
    std::vector<FoundSequence> found;
    for (const std::string& bytes : compute_on_ranks(rank_.data_on_host, batches, of_batch, show))
      found.push_back(sequence_of(bytes));
    num_done_ += num_lines;
    return found;
  }

  const GenerateArguments& arguments_;
  const ModelRank& rank_;
  std::ostream& err_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<LineGenerator> generator_;
  std::optional<ProgressLines> progress_;
  std::int64_t num_done_ = 0;  // lines of earlier calls
};

// Ids of a row of a batch.
std::vector<std::int32_t> row_of(const at::Tensor& ids_BT, std::int64_t row, std::int64_t length) {
  const at::Tensor ids_T = ids_BT[row].narrow(0, 0, length).to(at::kInt).contiguous();
  const auto* ids = ids_T.const_data_ptr<std::int32_t>();
  return {ids, ids + length};
}

// Generates the targets of a split of pairs, and returns the text of their score.
std::string generate_split(const GenerateArguments& arguments, Generation& generation,
                           ProcessGroup& world,
                           const std::function<void(const std::string&)>& print,
                           std::ostream& err) {
  const CheckpointFolder& checkpoint = generation.checkpoint;
  const configs::Config config = config_of(checkpoint);
  const std::unique_ptr<Task> task = make_task(config);
  if (task->source_stream().empty()) {
    fail(ExitCode::kUsage,
         "--split {}: the model has no sources, because its task is not translation; give prompts "
         "with --input",
         arguments.split);
  }
  const Corpus corpus(arguments.corpus.empty() ? config.data().corpus() : arguments.corpus);
  require_same_tokenizer(*task, checkpoint, arguments.path, corpus);
  check_same_corpus(world, corpus);
  const std::unique_ptr<SampleSource> samples = task->evaluation_source(corpus, arguments.split);
  if (const std::string cut = task->cut_texts(corpus, arguments.split);
      world.rank() == 0 && !cut.empty()) {
    err << "birkhoff: warning: " << cut << '\n';
  }
  const BleuTokenizer tokenizer = bleu_tokenizer(arguments.tokenize);
  BleuCounts bleu;
  ScoresByLength scores;
  constexpr std::int64_t kRound = 4096;
  for (std::int64_t begin = 0; begin < samples->num_samples(); begin += kRound) {
    const std::int64_t end = std::min(begin + kRound, samples->num_samples());
    const Batch pairs = read_samples(*samples, begin, end);
    const at::Tensor lengths_B = pairs.at(field::kLengths),
                     targets_B = pairs.at(field::kMask).sum(1, false, at::kLong);
    std::vector<std::vector<std::int32_t>> sources, references;
    for (std::int64_t row = 0; row < end - begin; ++row) {
      sources.push_back(row_of(pairs.at(field::kInputs), row, lengths_B[row].item<std::int64_t>()));
      references.push_back(
          row_of(pairs.at(field::kTargets), row, targets_B[row].item<std::int64_t>()));
    }
    const std::vector<FoundSequence> found = arguments.teacher_forced
                                                 ? generation.predictions_for(sources, references)
                                                 : generation.sequences_for(sources);
    if (world.rank() != 0) continue;
    std::string lines;
    for (std::size_t i = 0; i < found.size(); ++i) {
      (lines += generation.printer.line(found[i])) += '\n';
      if (arguments.score == "bleu") {
        // A byte model may write anything, and a cut target may end inside a character.
        const std::string hypothesis = with_replacements(generation.printer.text(found[i].ids)),
                          reference = with_replacements(generation.printer.text(references[i]));
        bleu.add(hypothesis, {reference}, tokenizer);
      }
      if (arguments.score == "exact_match") scores.add(found[i].ids, references[i]);
    }
    print(lines);
  }
  if (arguments.score == "bleu") return bleu_line(bleu, 1, tokenizer) + '\n';
  if (arguments.score == "exact_match") return scores.table();
  return "";
}

void generate_on_ranks(const GenerateArguments& arguments, const ModelRank& rank, std::ostream& out,
                       std::ostream& err) {
  ProcessGroup& world = rank.world;
  Generation generation(arguments, rank, err);
  std::string score;
  const auto run = [&](const std::function<void(const std::string&)>& print) {
    if (!arguments.split.empty()) {
      score = generate_split(arguments, generation, world, print, err);
      return;
    }
    transform_lines(arguments.input, world, print, [&](const std::vector<TextLine>& lines) {
      return generation.lines_for(lines);
    });
    generation.warn_of_cut_lines();
  };
  if (world.rank() != 0) {
    run([](const std::string&) {});
  } else if (arguments.output != "-") {
    write_file_durably(arguments.output, [&](File& file) {
      run([&](const std::string& text) { file.write_all(text); });
    });
  } else {
    const bool terminal = output_is_terminal();
    run([&](const std::string& text) {
      if (!arguments.score.empty()) return;  // only the score is printed
      out << (terminal ? terminal_text(text) : text);
      flush_output(out);
    });
  }
  if (world.rank() == 0) out << score;
}

}  // namespace

int generate_command(const GenerateArguments& arguments, std::ostream& out, std::ostream& err) {
  signal(SIGPIPE, SIG_DFL);  // when the reader of a pipe has left, end without a message
  options_of(arguments);
  // Found before hours of work: the file replaces what is there when all is done.
  if (arguments.output.empty() || (std::filesystem::exists(arguments.output) &&
                                   !std::filesystem::is_regular_file(arguments.output))) {
    if (arguments.output != "-") {
      fail(ExitCode::kUsage, "--out {}: is not the name of a file; leave it out for the output",
           arguments.output.empty() ? "''" : arguments.output);
    }
  }
  if (arguments.teacher_forced && arguments.score != "exact_match") {
    fail(ExitCode::kUsage,
         "--teacher-forced: needs --score exact_match; to generate, leave it out");
  }
  if (arguments.json && !arguments.score.empty() && arguments.output == "-") {
    fail(ExitCode::kUsage, "--json: only the score is printed; give --out for the texts");
  }
  const std::string& input = arguments.split.empty() ? arguments.input : arguments.split;
  return run_on_ranks(
      {.ranks = arguments.ranks,
       .tensor = arguments.tensor,
       .device = arguments.device,
       .command_line = command_line(arguments),
       .model = arguments.path,
       .check = [&] { check_lines_on_ranks(input); },
       .stopped = "later lines were not generated"},
      [&](const ModelRank& rank) { generate_on_ranks(arguments, rank, out, err); }, err);
}

}  // namespace birkhoff
