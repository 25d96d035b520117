#include "launcher/decoding/line_generator.h"

#include <ATen/ops/tensor.h>

#include <algorithm>

#include "cluster/base/error.h"
#include "cluster/base/text/plural.h"
#include "data/batch/padded_texts.h"
#include "launcher/decoding/encoded_lines.h"
#include "launcher/runs/run_paths.h"
#include "models/decoder.h"

namespace birkhoff {
namespace {

using Ids = std::vector<std::int32_t>;

// Lines are prompts.
class Continuations final : public LineGenerator {
 public:
  Continuations(const CheckpointFolder& checkpoint, Decoder& model, SearchOptions options,
                std::int64_t max_tokens)
      : model_(model),
        tokenizer_(tokenizer_of(checkpoint)),
        reads_bytes_(checkpoint.manifest.tokenizer() == "bytes"),
        restarts_(checkpoint.manifest.config().data().restart_at_documents()),
        options_(std::move(options)),
        max_tokens_(max_tokens) {
    if (max_tokens_ > model_.max_tokens()) {
      fail(ExitCode::kUsage,
           "--max-tokens {}: the model sees {} tokens at most; ask for fewer, or let "
           "`birkhoff sample` generate longer texts",
           max_tokens_, model_.max_tokens());
    }
  }

  Ids encode(const TextLine& line) override {
    Ids ids = ids_of(line.text, line.place, *tokenizer_, reads_bytes_);
    if (ids.empty()) {
      if (!options_.end_mark) {
        fail(ExitCode::kData,
             "{}: the line is empty, and a model that was trained on a single document has no end "
             "mark to start from: give a prompt",
             line.place);
      }
      if (restarts_) {
        fail(ExitCode::kData,
             "{}: the line is empty, and the model begins a document with an empty memory "
             "(data.restart_at_documents): use `birkhoff sample --prompt ''`, or give a prompt",
             line.place);
      }
      ids.push_back(*options_.end_mark);
    }
    // The cache holds the prompt and all generated ids but the last.
    const std::int64_t room = model_.max_tokens() - max_tokens_ + 1;
    if (std::ssize(ids) > room) {
      ids.erase(ids.begin(), ids.end() - room);
      ++num_cut_;
    }
    return ids;
  }
  bool needs_equal_lengths() const override { return true; }
  std::vector<FoundSequence> generate(const std::vector<Ids>& sources,
                                      const std::vector<std::uint64_t>& numbers) override {
    std::unique_ptr<DecodeCache> cache = model_.decode_cache(std::ssize(sources));
    for (std::size_t t = 0; t + 1 < sources[0].size(); ++t) {
      std::vector<std::int64_t> tokens;
      for (const Ids& source : sources) tokens.push_back(source[t]);
      model_.decode_step(*cache,
                         at::tensor(tokens, at::TensorOptions(at::kLong)).to(model_.device()));
    }
    std::vector<SearchStart> starts;
    for (std::size_t i = 0; i < sources.size(); ++i)
      starts.push_back({sources[i].back(), max_tokens_, numbers[i]});
    return find_sequences(model_, std::move(cache), starts, options_);
  }
  std::string cut_lines() const override {
    if (num_cut_ == 0) return "";
    return fmt::format(
        "of {} only the end is read: with --max-tokens {}, the {} tokens that the model sees leave "
        "{}",
        counted(num_cut_, "prompt"), max_tokens_, model_.max_tokens(),
        counted(model_.max_tokens() - max_tokens_ + 1, "token"));
  }

 private:
  Decoder& model_;
  std::unique_ptr<Tokenizer> tokenizer_;
  bool reads_bytes_, restarts_;
  SearchOptions options_;
  std::int64_t max_tokens_, num_cut_ = 0;
};

// Lines are sources.
class Translations final : public LineGenerator {
 public:
  Translations(const CheckpointFolder& checkpoint, SourceDecoder& model, SearchOptions options,
               std::optional<std::int64_t> max_tokens)
      : model_(model),
        sources_(checkpoint, model.max_source_tokens()),
        options_(std::move(options)),
        max_tokens_(max_tokens) {
    require(options_.end_mark.has_value(), "a translation model without an end mark");
    if (max_tokens_ && *max_tokens_ > model_.max_tokens()) {
      fail(ExitCode::kUsage,
           "--max-tokens {}: the model generates task.translation.target_length = {} tokens at "
           "most; ask for fewer",
           *max_tokens_, model_.max_tokens());
    }
  }

  Ids encode(const TextLine& line) override {
    SourceReader::Source source = sources_.read(line.text, line.place);
    num_cut_ += source.num_cut > 0;
    return std::move(source.ids);
  }
  bool needs_equal_lengths() const override { return false; }
  std::vector<FoundSequence> generate(const std::vector<Ids>& sources,
                                      const std::vector<std::uint64_t>& numbers) override {
    std::vector<SearchStart> starts;
    for (std::size_t i = 0; i < sources.size(); ++i) {
      constexpr std::int64_t kMoreThanSource = 50;
      starts.push_back({*options_.end_mark,
                        max_tokens_.value_or(std::min(std::ssize(sources[i]) + kMoreThanSource,
                                                      model_.max_tokens())),
                        numbers[i]});
    }
    const Batch batch = padded_texts({sources.begin(), sources.end()});
    return find_sequences(model_, model_.decode_cache(batch.to(model_.device())), starts, options_);
  }
  std::string cut_lines() const override {
    if (num_cut_ == 0) return "";
    return fmt::format("{} cut to the first {} tokens (data.sequence_length)",
                       counted(num_cut_, "line was", "lines were"), model_.max_source_tokens());
  }

 private:
  SourceDecoder& model_;
  SourceReader sources_;
  SearchOptions options_;
  std::optional<std::int64_t> max_tokens_;
  std::int64_t num_cut_ = 0;
};

}  // namespace

std::unique_ptr<LineGenerator> make_line_generator(const CheckpointFolder& checkpoint,
                                                   const std::string& path, Model& model,
                                                   SearchOptions options,
                                                   std::optional<std::int64_t> max_tokens) {
  if (checkpoint.manifest.has_end_of_document())
    options.end_mark = static_cast<std::int32_t>(checkpoint.manifest.end_of_document());
  if (SourceDecoder* const decoder = model.source_decoder()) {
    return std::make_unique<Translations>(checkpoint, *decoder, std::move(options), max_tokens);
  }
  Decoder* const decoder = model.decoder();
  if (decoder == nullptr || checkpoint.manifest.tokenizer().empty())
    fail(ExitCode::kUsage, "{}: a model of this task generates no text", path);
  constexpr std::int64_t kDefaultTokens = 200;
  return std::make_unique<Continuations>(
      checkpoint, *decoder, std::move(options),
      max_tokens.value_or(std::min(kDefaultTokens, decoder->max_tokens())));
}

}  // namespace birkhoff
