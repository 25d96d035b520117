#include "data/loader/target_counts.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <optional>
#include <vector>

#include "cluster/base/error.h"
#include "cluster/base/text/plural.h"
#include "cluster/base/text/utf8.h"
#include "data/corpus/shard_reader.h"

namespace birkhoff {
namespace {

// Reads the text of the unknown tokens of a split, one after another.
class UnknownText {
 public:
  UnknownText(const Corpus& corpus, const std::string& split) {
    const auto& entry = corpus.split(split);
    if (entry.has_unknown_text()) shards_.emplace(corpus, entry.unknown_text());
  }

  bool exists() const { return shards_.has_value(); }

  std::string next() {
    std::string text;
    for (;;) {
      if (next_ == part_.size()) read_part();
      const char c = part_[next_++];
      if (c == Tokenizer::kEndOfUnknown) return text;
      text += c;
    }
  }

 private:
  void read_part() {
    constexpr std::int64_t kMaxRows = 65536;
    const std::int64_t count = std::min(kMaxRows, shards_->elements() - read_);
    if (count == 0) {
      fail(ExitCode::kData,
           "{}: the text of unknown tokens ends before the tokens; prepare the corpus again",
           shards_->file_of(read_ - 1));
    }
    part_.resize(static_cast<std::size_t>(count));
    shards_->read_bytes(read_, count, part_.data());
    read_ += count;
    next_ = 0;
  }

  std::optional<ShardSequence> shards_;
  std::string part_;  // rows read from the record; those before next_ are used
  std::size_t next_ = 0;
  std::int64_t read_ = 0;  // rows
};

// Why the known tokens do not represent the text's bytes and words exactly; empty if they do.
std::string text_change(const Tokenizer& tokenizer, const configs::CorpusManifest::Counts& counts) {
  if (!tokenizer.may_change_text()) return "";
  if (!counts.has_changed_bytes()) {
    return "an earlier version prepared the corpus and did not check that the tokens give its text "
           "back: prepare it again in a new folder";
  }
  if (counts.changed_bytes() == 0) return "";
  return fmt::format(
      "the SentencePiece model changes the text: {} of {} are in parts that the tokens do not give "
      "back",
      counts.changed_bytes(), counted(counts.bytes(), "byte"));
}

// Adds up the targets of a stream, from its first token on.
class Counter {
 public:
  Counter(const Corpus& corpus, const std::string& split, const std::string& stream)
      : counts_(corpus.split(split).counts()),
        tokenizer_(corpus.tokenizer(stream)),
        texts_(static_cast<std::size_t>(corpus.tokenizer_entry(stream).vocabulary())),
        unknown_(corpus, split),
        keeps_white_space_(!tokenizer_->drops_white_space()) {
    for (std::size_t id = 0; id < texts_.size(); ++id)
      texts_[id] = tokenizer_->text_of(static_cast<std::int32_t>(id));
  }

  void visit(std::int64_t id, bool starts_document, bool is_target) {
    const auto& known = texts_[static_cast<std::size_t>(id)];
    const std::string lost = known || !unknown_.exists() ? "" : unknown_.next();
    std::string_view text = known ? *known : lost;
    // The model has added it.
    if (starts_document && counts_.added_spaces() > 0 && text.starts_with(' '))
      text.remove_prefix(1);
    after_space_ |= starts_document || !keeps_white_space_;
    std::int64_t words = 0, characters = 0;
    for (const char c : text) {
      characters += begins_character(c);
      const bool space = is_white_space(c);
      words += !space && after_space_;
      after_space_ = space;
    }
    if (!is_target) return;
    const auto bytes = static_cast<std::int64_t>(text.size());
    ++targets_.tokens;
    targets_.bytes += bytes;
    targets_.characters += characters;
    targets_.words += words;
    targets_.line_ends += std::ranges::count(text, '\n');
    if (known) return;
    ++targets_.unknown_tokens;
    targets_.unknown_bytes += bytes;
    unseen_ += unknown_.exists() ? 0 : 1;
  }

  TargetCounts finish() const {
    TargetCounts targets = targets_;
    targets.no_bytes = targets.no_words = text_change(*tokenizer_, counts_);
    if (unseen_ > 0) {
      targets.no_bytes = targets.no_words = fmt::format(
          "{} of {} are unknown tokens, and an earlier version prepared the corpus without their "
          "text: prepare it again in a new folder",
          unseen_, counted(targets.tokens, "target"));
    } else if (!keeps_white_space_) {
      targets.no_bytes = "the tokenizer does not keep white space";
    }
    return targets;
  }

 private:
  const configs::CorpusManifest::Counts& counts_;
  const std::unique_ptr<Tokenizer> tokenizer_;
  std::vector<std::optional<std::string>> texts_;  // of the ids
  UnknownText unknown_;
  const bool keeps_white_space_;
  TargetCounts targets_;
  bool after_space_ = true;
  std::int64_t unseen_ = 0;  // unknown targets without their text
};

// Tokens that are read at a time.
constexpr std::int64_t kMaxTokens = 65536;

// Nats per unit, including the cost of spelling the unknown tokens; unset if there are no units.
std::optional<double> mean_cost(const TargetCounts& targets, double nats, std::int64_t units) {
  if (units == 0) return std::nullopt;
  const auto spelt = static_cast<double>(targets.unknown_bytes + targets.unknown_tokens);
  return (nats + 8 * std::numbers::ln2 * spelt) / static_cast<double>(units);
}

std::optional<double> mean_bits(const TargetCounts& targets, double nats, std::int64_t units) {
  if (!targets.no_bytes.empty()) return std::nullopt;
  const auto cost = mean_cost(targets, nats, units);
  return cost ? std::optional(*cost / std::numbers::ln2) : std::nullopt;
}

std::optional<double> mean_perplexity(const TargetCounts& targets, double nats,
                                      std::int64_t units) {
  if (!targets.no_words.empty()) return std::nullopt;
  const auto cost = mean_cost(targets, nats, units);
  return cost ? std::optional(std::exp(*cost)) : std::nullopt;
}

}  // namespace

std::optional<double> TargetCounts::bits_per_byte(double nats) const {
  return mean_bits(*this, nats, bytes);
}

std::optional<double> TargetCounts::bits_per_character(double nats) const {
  return mean_bits(*this, nats, characters);
}

std::optional<double> TargetCounts::word_perplexity(double nats) const {
  return mean_perplexity(*this, nats, words);
}

std::optional<double> TargetCounts::word_and_line_perplexity(double nats) const {
  return mean_perplexity(*this, nats, words + line_ends);
}

TargetCounts count_targets(const Corpus& corpus, const WindowOptions& options,
                           std::int64_t num_windows) {
  const auto& counts = corpus.split(options.split).counts();
  StreamReader reader(corpus, options.split, options.stream);
  Counter counter(corpus, options.split, options.stream);
  const bool skips_starts =
      options.restart_at_documents && !corpus.manifest().tokenizer().has_end_of_document();

  // Token 0 of the stream is no target.
  const std::int64_t end = std::min(options.sequence_length + (num_windows - 1) * options.step(),
                                    reader.elements() - 1) +
                           1;
  std::vector<std::int64_t> ids(static_cast<std::size_t>(std::min(kMaxTokens, end)));
  for (std::int64_t begin = 0; begin < end; begin += kMaxTokens) {
    const std::int64_t count = std::min(kMaxTokens, end - begin);
    reader.read(begin, count, ids.data());
    const std::vector<std::int64_t> ends =
        reader.document_ends(std::max<std::int64_t>(0, begin - 1), begin + count - 1);
    auto next_end = ends.begin();
    for (std::int64_t t = 0; t < count; ++t) {
      const bool starts = next_end != ends.end() && *next_end == begin + t;
      if (starts) ++next_end;
      counter.visit(ids[static_cast<std::size_t>(t)], starts,
                    begin + t > 0 && !(starts && skips_starts));
    }
  }
  TargetCounts targets = counter.finish();
  // A long document has more such spaces, one per part (docs/corpus_format.md): the targets' share
  // of them.
  const double inside = static_cast<double>(counts.added_spaces() - counts.documents());
  if (inside > 0 && targets.tokens > 0) {
    const double share =
        static_cast<double>(targets.tokens) / static_cast<double>(reader.elements() - 1);
    const std::int64_t added = std::llround(inside * share);
    targets.bytes = std::max<std::int64_t>(0, targets.bytes - added);
    targets.characters = std::max<std::int64_t>(0, targets.characters - added);
  }
  return targets;
}

TargetCounts count_pair_targets(const Corpus& corpus, const PairOptions& options,
                                std::int64_t num_pairs) {
  StreamReader reader(corpus, options.split, options.target);
  Counter counter(corpus, options.split, options.target);
  std::vector<std::int64_t> ids;
  for (std::int64_t pair = 0; pair < num_pairs; ++pair) {
    const auto [begin, end] = reader.document(pair);
    ids.resize(static_cast<std::size_t>(end - begin));
    reader.read(begin, end - begin, ids.data());
    for (std::int64_t t = 0; t < end - begin; ++t) {
      counter.visit(ids[static_cast<std::size_t>(t)], /*starts_document=*/t == 0,
                    /*is_target=*/t < options.target_length);
    }
  }
  return counter.finish();
}

}  // namespace birkhoff
