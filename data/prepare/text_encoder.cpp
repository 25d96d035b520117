#include "data/prepare/text_encoder.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "cluster/base/error.h"
#include "cluster/base/text/plural.h"
#include "data/corpus/manifest.h"
#include "data/corpus/shard_format.h"
#include "data/prepare/pack.h"

namespace birkhoff {
namespace {

using configs::CorpusManifest;

constexpr char kUnknownRecord[] = "unknown";

CorpusManifest::Dtype dtype_of(const TextEncoder::Stream& stream) {
  return shard_format::id_dtype(stream.entry.vocabulary());
}

}  // namespace

TextEncoder::TextEncoder(const std::vector<Stream>& streams, const Options& options,
                         ProcessGroup& ranks)
    : streams_(streams), options_(options), ranks_(ranks) {
  for (const SplitIndex split : kSplits) {
    if (!options.has_split[split]) continue;
    Output& output = outputs_[split];
    const std::string name = kSplitNames[split];
    for (const Stream& stream : streams) {
      output.streams.emplace_back(
          stream, StreamWriter(options.folder, name, stream.name, dtype_of(stream),
                               options.shard_tokens, ShardShare{ranks.rank(), ranks.size()}));
    }
    if (ranks.rank() != 0) continue;
    if (options.class_names != nullptr) {
      output.labels.emplace(options.folder, name, label_record(*options.class_names),
                            options.shard_tokens);
    }
    CorpusManifest::Record unknown;
    unknown.set_name(kUnknownRecord);
    unknown.set_dtype(CorpusManifest::u8);
    output.unknown.emplace(options.folder, name, unknown, options.shard_tokens);
  }
}

void TextEncoder::add(SplitIndex split, std::size_t stream, const Document& document,
                      std::string_view text, std::int64_t offset) {
  if (bundle_bytes_ >= kBundleBytes) {
    bundle_bytes_ = 0;
    if (++bundle_ == ranks_.size()) exchange();
  }
  bundle_bytes_ += std::ssize(text);
  ++part_;
  Output& output = outputs_[split];
  const bool is_counted = stream == 0;
  if (is_counted) output.counter.add(text);
  if (!is_mine()) return;
  Ids& to = output.streams.at(stream);
  const Tokenizer& tokenizer = to.stream.tokenizer;
  std::string unknown;
  const std::vector<std::int32_t> ids = encode(tokenizer, document, text, offset, unknown);
  append_ids(ids, dtype_of(to.stream), to.encoded.values);
  to.num_unknown += std::ranges::count(unknown, Tokenizer::kEndOfUnknown);
  if (!is_counted) return;
  to.encoded.unknown += unknown;
  const auto back = output.counter.add_tokens(tokenizer, text, ids, unknown);
  if (back && lost_.empty()) {
    lost_part_ = part_;
    lost_ = fmt::format("in {} of {}, {}", counted(text.size(), "byte"), document.shown_path,
                        lost_text(text, *back));
  }
}

void TextEncoder::end_document(SplitIndex split, const Document& document, std::uint16_t label) {
  Output& output = outputs_[split];
  output.counter.end_document();
  if (output.labels) output.labels->append(&label, 1);
  for (Ids& ids : output.streams) {
    const CorpusManifest::Tokenizer& entry = ids.stream.entry;
    if (!entry.has_end_of_document()) ids.unwritten.push_back(document.shown_path);
    if (!is_mine()) continue;
    if (entry.has_end_of_document()) {
      append_ids({static_cast<std::int32_t>(entry.end_of_document())}, dtype_of(ids.stream),
                 ids.encoded.values);
    }
    ids.encoded.ends.push_back(ids.encoded.values.size());
  }
}

void TextEncoder::finish(CorpusManifest& manifest, std::vector<std::string>& notes) {
  exchange();
  const std::string lost = gathered_loss();
  for (const SplitIndex split : kSplits) {
    Output& output = outputs_[split];
    if (output.streams.empty()) continue;
    std::vector<CorpusManifest::Stream> streams;
    for (Ids& ids : output.streams) streams.push_back(gathered_stream(ids));
    const CorpusManifest::Counts counts = gathered_counts(output);
    // The manifest has those of the first stream.
    for (std::size_t i = 1; i < streams.size(); ++i) {
      const std::int64_t unknown = gathered_unknown(output.streams[i]);
      if (unknown == 0) continue;
      notes.push_back(fmt::format("split {}: {} of the {} of the stream {} are unknown",
                                  kSplitNames[split], unknown,
                                  counted(streams[i].elements(), "token"), streams[i].name()));
    }
    if (ranks_.rank() != 0) continue;
    CorpusManifest::Split& written = *manifest.add_split();
    written.set_name(kSplitNames[split]);
    written.mutable_stream()->Assign(streams.begin(), streams.end());
    if (output.labels) *written.add_record() = output.labels->finish();
    CorpusManifest::Record unknown = output.unknown->finish();
    if (unknown.rows() > 0) *written.mutable_unknown_text() = std::move(unknown);
    *written.mutable_counts() = counts;
    if (counts.changed_bytes() > 0) {
      notes.push_back(fmt::format(
          "warning: split {}: the tokens do not restore parts with {} of its {}, so its metrics "
          "per byte and per word are withheld: {}",
          written.name(), counts.changed_bytes(), counted(counts.bytes(), "byte"), lost));
    }
  }
}

// Adds the source location to errors: a vocabulary learned from other text may lack a character.
std::vector<std::int32_t> TextEncoder::encode(const Tokenizer& tokenizer, const Document& document,
                                              std::string_view text, std::int64_t offset,
                                              std::string& unknown) {
  try {
    return tokenizer.encode(text, &unknown);
  } catch (const Error& error) {
    const std::string part = offset == 0 ? "" : fmt::format(", from byte {} on", offset);
    fail(error.code(), "{}{}: {}", document.shown_path, part, error.what());
  }
}

// Writes the bundles since the last exchange, one of each rank.
void TextEncoder::exchange() {
  std::string mine;
  for (Output& output : outputs_) {
    for (Ids& ids : output.streams) {
      pack(ids.encoded.values, mine);
      pack(ids.encoded.ends, mine);
      pack(ids.encoded.unknown, mine);
      ids.encoded = {};
    }
  }
  if (ranks_.size() == 1) {
    write(mine);
  } else {
    for (const std::string& bundle : ranks_.all_gather_bytes(mine, "token ids")) write(bundle);
  }
  bundle_ = 0;
}

void TextEncoder::write(const std::string& bundle) {
  std::string_view rest = bundle;
  for (Output& output : outputs_) {
    for (Ids& ids : output.streams) {
      const auto values = unpack<std::vector<char>>(rest);
      const auto ends = unpack<std::vector<std::uint64_t>>(rest);
      const auto unknown = unpack<std::string>(rest);
      std::size_t begin = 0;
      for (const std::uint64_t end : ends) {
        ids.writer.append_values(std::span(values).subspan(begin, end - begin));
        require_tokens(ids, ids.open_bytes + end - begin);
        ids.writer.end_document();
        ids.open_bytes = 0;
        begin = end;
      }
      ids.writer.append_values(std::span(values).subspan(begin));
      ids.open_bytes += values.size() - begin;
      if (output.unknown) output.unknown->append(unknown.data(), std::ssize(unknown));
    }
  }
}

// Call for each document, in order.
void TextEncoder::require_tokens(Ids& ids, std::size_t bytes) {
  if (ids.stream.entry.has_end_of_document()) return;
  if (bytes == 0) {
    fail(ExitCode::kData,
         "{}: nothing but white space, for which the tokenizer has no token; leave it out",
         ids.unwritten.front());
  }
  ids.unwritten.pop_front();
}

// With the shards of all ranks.
CorpusManifest::Stream TextEncoder::gathered_stream(Ids& ids) {
  CorpusManifest::Stream stream = ids.writer.finish();
  if (&ids.stream.entry != &streams_.front().entry) *stream.mutable_tokenizer() = ids.stream.entry;
  const auto streams = ranks_.all_gather_bytes(stream.SerializeAsString(), "shards");
  for (int shard = 0; shard < stream.shard_size(); ++shard) {
    CorpusManifest::Stream writer;
    const int rank = shard % ranks_.size();
    const bool parsed = writer.ParseFromString(streams[static_cast<std::size_t>(rank)]);
    require(parsed && writer.shard_size() == stream.shard_size(), "the shards of another rank");
    *stream.mutable_shard(shard) = writer.shard(shard);
  }
  return stream;
}

// Each rank has counted all of the text, and the tokens of its bundles.
CorpusManifest::Counts TextEncoder::gathered_counts(const Output& output) {
  CorpusManifest::Counts sums = output.counter.counts();
  std::int64_t unknown_tokens = 0, unknown_bytes = 0, changed_bytes = 0, added_spaces = 0;
  for (const std::string& bytes :
       ranks_.all_gather_bytes(sums.SerializeAsString(), "counts of tokens")) {
    CorpusManifest::Counts counts;
    require(counts.ParseFromString(bytes), "the counts of another rank");
    unknown_tokens += counts.unknown_tokens();
    unknown_bytes += counts.unknown_bytes();
    changed_bytes += counts.changed_bytes();
    added_spaces += counts.added_spaces();
  }
  sums.set_unknown_tokens(unknown_tokens);  // 0 is written, too
  sums.set_unknown_bytes(unknown_bytes);
  sums.set_changed_bytes(changed_bytes);
  sums.set_added_spaces(added_spaces);
  return sums;
}

// The number of unknown tokens of a stream, over all ranks.
std::int64_t TextEncoder::gathered_unknown(const Ids& ids) {
  std::int64_t sum = 0;
  std::string mine;
  pack(std::vector{ids.num_unknown}, mine);
  for (const std::string& found : ranks_.all_gather_bytes(mine, "unknown tokens")) {
    std::string_view rest = found;
    sum += unpack<std::vector<std::int64_t>>(rest).at(0);
  }
  return sum;
}

// What the first part loses that any rank has found.
std::string TextEncoder::gathered_loss() {
  std::string first;
  std::int64_t first_part = 0;
  std::string mine;
  pack(std::vector{lost_part_}, mine);
  pack(lost_, mine);
  for (const std::string& found : ranks_.all_gather_bytes(mine, "lost text")) {
    std::string_view rest = found;
    const std::int64_t part = unpack<std::vector<std::int64_t>>(rest).at(0);
    if (part == 0 || (first_part != 0 && first_part < part)) continue;
    first_part = part;
    first = unpack<std::string>(rest);
  }
  return first;
}

}  // namespace birkhoff
