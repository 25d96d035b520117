#include <signal.h>

#include <nlohmann/json.hpp>
#include <ostream>

#include "cluster/base/error.h"
#include "cluster/base/text/plural.h"
#include "launcher/commands.h"
#include "launcher/commands/progress_lines.h"
#include "launcher/decoding/encoded_lines.h"
#include "launcher/decoding/lines_on_ranks.h"
#include "launcher/output.h"
#include "launcher/runs/model_ranks.h"
#include "launcher/runs/run_paths.h"
#include "models/decoder.h"
#include "runtime/decoding/likelihood.h"

namespace birkhoff {
namespace {

constexpr std::int64_t kMaxBatchRows = 64;

// A line of the input, and how many of its ids do not fit the model.
struct Text {
  ScoredTokens tokens;
  std::int64_t num_cut = 0;
};

// The field of an object; empty if it is missing. Error(kData) if it is not a text.
std::string field_of(const nlohmann::json& object, const char* name, const std::string& place) {
  const auto field = object.find(name);
  if (field == object.end()) return "";
  if (!field->is_string()) fail(ExitCode::kData, "{}: \"{}\" is not a text", place, name);
  return field->get<std::string>();
}

// Error(kData) if the line is none; `example` says what it should be.
nlohmann::json object_of(const TextLine& line, const char* example) {
  auto object = nlohmann::json::parse(line.text, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object())
    fail(ExitCode::kData, "{}: is not a JSON object; a line is {}", line.place, example);
  return object;
}

class LineReader {
 public:
  virtual ~LineReader() = default;
  // Error(kData) with the line's place if it is no such object or cannot be encoded.
  virtual Text read(const TextLine& line) const = 0;
  // What was done to texts that are too long.
  virtual std::string cut_texts(std::int64_t number) const = 0;
};

// {"text": ...} or {"context": ..., "continuation": ...}
class TextReader final : public LineReader {
 public:
  TextReader(const CheckpointFolder& checkpoint, std::int64_t max_tokens)
      : tokenizer_(tokenizer_of(checkpoint)), max_tokens_(max_tokens) {
    if (checkpoint.manifest.has_end_of_document())
      end_mark_ = static_cast<std::int32_t>(checkpoint.manifest.end_of_document());
  }

  Text read(const TextLine& line) const override {
    const nlohmann::json object =
        object_of(line, "{\"context\": \"...\", \"continuation\": \"...\"} or {\"text\": \"...\"}");
    const bool is_whole = object.contains("text");
    if (is_whole == object.contains("continuation")) {
      fail(ExitCode::kData, "{}: needs either \"text\" or \"continuation\"", line.place);
    }
    std::string context = field_of(object, "context", line.place),
                continuation = field_of(object, is_whole ? "text" : "continuation", line.place);
    if (is_whole && !context.empty())
      fail(ExitCode::kData, "{}: \"context\" belongs to \"continuation\"", line.place);
    // Tokenizers join a space to the word behind it.
    const std::size_t end = context.find_last_not_of(' ') + 1;
    continuation.insert(0, context.substr(end));
    context.resize(end);
    return text_of(context, continuation, line.place);
  }
  std::string cut_texts(std::int64_t number) const override {
    return fmt::format("of {} only the end is read: the model sees {} tokens",
                       counted(number, "text"), max_tokens_);
  }

 private:
  Text text_of(const std::string& context, const std::string& continuation,
               const std::string& place) const {
    Text text;
    std::vector<std::int32_t>& ids = text.tokens.ids;
    std::size_t num_context = 0;
    try {
      ids = tokenizer_->encode(context + continuation);
      num_context = tokenizer_->encode(context).size();
    } catch (const Error& error) {
      fail(error.code(), "{}: {}", place, error.what());
    }
    if (context.empty() && end_mark_) {  // the beginning of a document
      ids.insert(ids.begin(), *end_mark_);
      num_context = 1;
    }
    // Without anything before it, the first token cannot be predicted.
    num_context = std::max<std::size_t>(num_context, 1);
    if (ids.size() <= num_context) fail(ExitCode::kData, "{}: there is no token to predict", place);
    text.num_cut = std::max<std::int64_t>(0, std::ssize(ids) - max_tokens_ - 1);
    ids.erase(ids.begin(), ids.begin() + text.num_cut);
    text.tokens.num_counted =
        std::min<std::int64_t>(std::ssize(ids) - 1, std::ssize(ids) + text.num_cut -
                                                        static_cast<std::int64_t>(num_context));
    return text;
  }

  std::unique_ptr<Tokenizer> tokenizer_;
  std::int64_t max_tokens_;
  std::optional<std::int32_t> end_mark_;
};

// {"source": ..., "target": ...}
class PairReader final : public LineReader {
 public:
  PairReader(const CheckpointFolder& checkpoint, std::int64_t max_source_tokens,
             std::int64_t max_tokens)
      : sources_(checkpoint, max_source_tokens),
        tokenizer_(tokenizer_of(checkpoint)),
        end_mark_(static_cast<std::int32_t>(checkpoint.manifest.end_of_document())),
        max_source_tokens_(max_source_tokens),
        max_tokens_(max_tokens) {}

  Text read(const TextLine& line) const override {
    const nlohmann::json object = object_of(line, "{\"source\": \"...\", \"target\": \"...\"}");
    for (const char* name : {"source", "target"}) {
      if (!object.contains(name)) fail(ExitCode::kData, "{}: needs \"{}\"", line.place, name);
    }
    SourceReader::Source source = sources_.read(field_of(object, "source", line.place), line.place);
    Text text;
    text.num_cut = source.num_cut;
    text.tokens.source = std::move(source.ids);
    std::vector<std::int32_t>& ids = text.tokens.ids;
    ids = ids_of(field_of(object, "target", line.place), line.place, *tokenizer_,
                 /*reads_bytes=*/true);  // JSON is UTF-8
    ids.insert(ids.begin(), end_mark_);
    ids.push_back(end_mark_);
    const std::int64_t num_cut = std::max<std::int64_t>(0, std::ssize(ids) - max_tokens_ - 1);
    ids.resize(ids.size() - static_cast<std::size_t>(num_cut));
    text.num_cut += num_cut;
    text.tokens.num_counted = std::ssize(ids) - 1;
    return text;
  }
  std::string cut_texts(std::int64_t number) const override {
    return fmt::format("of {} only the beginning is read: the model sees {} and {}",
                       counted(number, "pair"),
                       counted(max_source_tokens_, "token of a source", "tokens of a source"),
                       counted(max_tokens_, "token of a target", "tokens of a target"));
  }

 private:
  SourceReader sources_;
  std::unique_ptr<Tokenizer> tokenizer_;
  std::int32_t end_mark_;
  std::int64_t max_source_tokens_, max_tokens_;
};

std::string json_of(const Likelihood& likelihood, std::int64_t num_cut) {
  nlohmann::ordered_json object = {{"log_likelihood", likelihood.log_probability},
                                   {"tokens", likelihood.num_tokens},
                                   {"is_greedy", likelihood.is_greedy}};
  if (num_cut > 0) object["cut_tokens"] = num_cut;
  return object.dump();
}

void score_lines(const ScoreArguments& arguments, const ModelRank& rank, std::ostream& out,
                 std::ostream& err) {
  ProcessGroup& world = rank.world;
  const bool speaks = world.rank() == 0;
  const CheckpointFolder checkpoint = agreed_checkpoint(arguments.path, world);
  const configs::CheckpointManifest& manifest = checkpoint.manifest;
  const std::unique_ptr<Model> model = load_model(checkpoint, rank.place);
  TokenScorer* const scorer = model->token_scorer();
  if (scorer == nullptr) {
    fail(ExitCode::kUsage,
         "{}: a model of this task predicts no text; name a language model or a translation model",
         arguments.path);
  }
  for (const std::string& warning : model->warnings()) {
    if (speaks) err << "birkhoff: warning: " << warning << '\n';
  }
  std::unique_ptr<LineReader> reader;
  std::optional<std::int32_t> restart_after;  // of texts
  if (const SourceDecoder* const pairs = model->source_decoder()) {
    reader =
        std::make_unique<PairReader>(checkpoint, pairs->max_source_tokens(), scorer->max_tokens());
  } else {
    reader = std::make_unique<TextReader>(checkpoint, scorer->max_tokens());
    if (manifest.has_end_of_document() && manifest.config().data().restart_at_documents())
      restart_after = static_cast<std::int32_t>(manifest.end_of_document());
  }

  std::optional<ProgressLines> progress;
  if (speaks) progress.emplace(err);
  std::int64_t num_done = 0, num_cut = 0;  // lines
  const auto score_round = [&](const std::vector<TextLine>& lines) {
    std::vector<Text> texts;
    std::vector<std::int64_t> lengths;
    check_on_rank_0_first(world, [&] {
      for (const TextLine& line : lines) {
        texts.push_back(reader->read(line));
        const ScoredTokens& tokens = texts.back().tokens;
        lengths.push_back(std::max(std::ssize(tokens.ids), std::ssize(tokens.source)));
        num_cut += texts.back().num_cut > 0;
      }
    });
    const Batches batches =
        batches_by_length(lengths, kMaxBatchRows, kMaxBatchLogits / manifest.vocabulary());
    const auto score_batch = [&](const std::vector<std::size_t>& batch) {
      std::vector<ScoredTokens> of_batch;
      for (const std::size_t item : batch) of_batch.push_back(texts[item].tokens);
      const std::vector<Likelihood> found = likelihoods(*scorer, of_batch, restart_after);
      std::vector<std::string> printed;
      for (std::size_t i = 0; i < batch.size(); ++i)
        printed.push_back(json_of(found[i], texts[batch[i]].num_cut));
      return printed;
    };
    const auto show = [&](std::int64_t done) {
      rank.tick();
      if (!progress) return;
      const std::int64_t of_all = std::min(done * rank.data.size(), std::ssize(lines));
      progress->show(fmt::format("score: {} of the {} read so far", num_done + of_all,
                                 counted(num_done + std::ssize(lines), "line")));
    };
    std::vector<std::string> results =
        compute_on_ranks(rank.data_on_host, batches, score_batch, show);
    num_done += std::ssize(lines);
    return results;
  };
  const auto print = [&](const std::string& text) {
    out << text;
    flush_output(out);
  };
  transform_lines(arguments.input, world, print, score_round);
  if (speaks && num_cut > 0) {
    err << "birkhoff: warning: " << reader->cut_texts(num_cut)
        << "; \"cut_tokens\" says how many are missing\n";
  }
}

}  // namespace

int score_command(const ScoreArguments& arguments, std::ostream& out, std::ostream& err) {
  signal(SIGPIPE, SIG_DFL);  // when the reader of a pipe has left, end without a message
  return run_on_ranks(
      {.ranks = arguments.ranks,
       .tensor = arguments.tensor,
       .device = arguments.device,
       .command_line = {"score", arguments.path, "--input", arguments.input, "--device",
                        arguments.device, "--tensor", std::to_string(arguments.tensor)},
       .model = arguments.path,
       .check = [&] { check_lines_on_ranks(arguments.input); },
       .stopped = "later lines were not scored"},
      [&](const ModelRank& rank) { score_lines(arguments, rank, out, err); }, err);
}

}  // namespace birkhoff
