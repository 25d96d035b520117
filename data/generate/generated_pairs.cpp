#include "data/generate/generated_pairs.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>

#include "cluster/base/error.h"
#include "cluster/base/files/checksum.h"
#include "cluster/base/files/file.h"
#include "cluster/base/random/philox.h"
#include "data/corpus/shard_format.h"
#include "data/corpus/shard_writer.h"
#include "data/generate/made_corpus.h"
#include "data/prepare/text_counts.h"
#include "data/tokenizers/known_tokenizer.h"

namespace birkhoff {
namespace {

using configs::CorpusManifest;

constexpr std::int64_t kShardTokens = 16 << 20;

// A number from 0 to below n. The shares of two numbers differ by at most n / 2^32 of one.
std::int64_t below(std::int64_t n, std::uint32_t bits) {
  return static_cast<std::int64_t>((std::uint64_t{bits} * static_cast<std::uint64_t>(n)) >> 32);
}

std::string vocabulary_file(std::int64_t symbols) {
  std::string content = "birkhoff whitespace 1\nunknown no\n<pad>\n<end>\n";
  for (std::int64_t symbol = 0; symbol < symbols; ++symbol) content += fmt::format("{}\n", symbol);
  return content;
}

// The text of ids, without the end mark.
std::string text_of(const std::vector<std::int32_t>& ids) {
  std::string text;
  for (auto id = ids.begin(); id + 1 != ids.end(); ++id) {
    text += fmt::format("{}{}", text.empty() ? "" : " ", *id - GeneratedPairs::kFirstSymbolId);
  }
  return text;
}

void add_split(const std::string& folder, const GeneratedPairs& pairs, int split,
               CorpusManifest& manifest) {
  const std::string name = kSplitNames[split];
  const auto dtype = shard_format::id_dtype(manifest.tokenizer().vocabulary());
  StreamWriter targets(folder, name, "target", dtype, kShardTokens);
  StreamWriter sources(folder, name, "source", dtype, kShardTokens);
  TextCounter counter;
  const std::int64_t samples = split == kTrain ? pairs.samples : pairs.test_samples;
  for (std::int64_t i = 0; i < samples; ++i) {
    const std::vector<std::int32_t> source = pairs.source(split, i), target = pairs.target(source);
    sources.append(source);
    sources.end_document();
    targets.append(target);
    targets.end_document();
    counter.add(text_of(target));
    counter.end_document();
  }
  CorpusManifest::Split& written = *manifest.add_split();
  written.set_name(name);
  *written.add_stream() = targets.finish();
  *written.add_stream() = sources.finish();
  *written.mutable_counts() = counter.counts();
  written.mutable_counts()->set_unknown_tokens(0);
  written.mutable_counts()->set_unknown_bytes(0);
}

}  // namespace

const std::vector<std::string>& GeneratedPairs::tasks() {
  static const std::vector<std::string> kTasks = {"copy", "reverse", "sort"};
  return kTasks;
}

std::vector<std::int32_t> GeneratedPairs::source(int split, std::int64_t number) const {
  const std::uint64_t key =
      noise_key(seed, static_cast<std::uint64_t>(split), 0, NoisePurpose::kSampleOrder);
  std::array<std::uint32_t, 4> bits = {};
  std::int64_t used = 0;
  const auto next = [&] {
    if (used % 4 == 0)
      bits = philox(key, static_cast<std::uint64_t>(number), static_cast<std::uint64_t>(used / 4));
    return bits[static_cast<std::size_t>(used++ % 4)];
  };
  const std::int64_t count = 1 + below(split == kTrain ? train_length : length, next());
  std::vector<std::int32_t> ids;
  for (std::int64_t i = 0; i < count; ++i)
    ids.push_back(static_cast<std::int32_t>(kFirstSymbolId + below(symbols, next())));
  ids.push_back(static_cast<std::int32_t>(kEndId));
  return ids;
}

std::vector<std::int32_t> GeneratedPairs::target(const std::vector<std::int32_t>& source) const {
  std::vector<std::int32_t> ids = source;
  if (task == "sort") std::sort(ids.begin(), ids.end() - 1);
  if (task == "reverse") std::reverse(ids.begin(), ids.end() - 1);
  return ids;
}

bool generate_pairs(const std::string& out, const GeneratedPairs& pairs) {
  require(std::ranges::count(GeneratedPairs::tasks(), pairs.task) == 1 && pairs.symbols >= 1 &&
              pairs.symbols <= GeneratedPairs::kMaxSymbols && pairs.train_length >= 1 &&
              pairs.train_length <= GeneratedPairs::kMaxLength && pairs.length >= 1 &&
              pairs.length <= GeneratedPairs::kMaxLength && pairs.samples >= 1 &&
              pairs.test_samples >= 1,
          "options of generated pairs");
  const std::string options = fmt::format(
      "generated {}, symbols {}, train length {}, length {}, samples {}, test samples {}, seed {}",
      pairs.task, pairs.symbols, pairs.train_length, pairs.length, pairs.samples,
      pairs.test_samples, pairs.seed);
  return make_corpus(out, options, [&](const OutFolder& folder, CorpusManifest& manifest) {
    const std::string content = vocabulary_file(pairs.symbols);
    CorpusManifest::Tokenizer& tokenizer = *manifest.mutable_tokenizer();
    tokenizer.set_kind("whitespace");
    tokenizer.set_vocabulary(GeneratedPairs::kFirstSymbolId + pairs.symbols);
    tokenizer.set_end_of_document(GeneratedPairs::kEndId);
    tokenizer.set_file(tokenizer_file_name(tokenizer.kind()));
    tokenizer.set_hash(xxh3_hex(content.data(), content.size()));
    write_file_durably(folder.file(tokenizer.file()), content);
    for (const SplitIndex split : kSplits) add_split(folder.path(), pairs, split, manifest);
  });
}

}  // namespace birkhoff
