#include "data/generate/generate.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <exception>
#include <mutex>
#include <thread>

#include "cluster/base/error.h"
#include "cluster/base/files/checksum.h"
#include "cluster/base/files/file.h"
#include "data/corpus/manifest.h"
#include "data/corpus/record_writer.h"
#include "data/corpus/shard_file.h"
#include "data/corpus/shard_format.h"
#include "data/generate/generated_images.h"
#include "data/generate/generated_text.h"
#include "data/generate/made_corpus.h"
#include "data/prepare/out_folder.h"
#include "data/prepare/prepare_progress.h"
#include "data/tokenizers/known_tokenizer.h"

namespace birkhoff {
namespace {

using configs::CorpusManifest;
using Shard = CorpusManifest::Shard;

constexpr std::int64_t kLabelShardRows = 16 << 20;

// Rows [begin, end) of the data set: the split valid follows train.
struct SplitRows {
  std::string name;
  std::int64_t begin, end;
  std::int64_t size() const { return end - begin; }
};

// Calls make(i) for i in [0, count) on several threads and returns the results in order. An error
// of one ends the others after their current item, and is rethrown.
template <typename Result>
std::vector<Result> on_threads(std::int64_t count, int threads,
                               const std::function<Result(std::int64_t)>& make) {
  std::vector<Result> results(static_cast<std::size_t>(count));
  std::atomic<std::int64_t> next = 0;
  std::exception_ptr error;
  std::mutex error_mutex;
  const auto work = [&] {
    try {
      for (std::int64_t i = next++; i < count; i = next++)
        results[static_cast<std::size_t>(i)] = make(i);
    } catch (...) {
      const std::lock_guard lock(error_mutex);
      error = std::current_exception();
      next = count;
    }
  };
  {
    std::vector<std::jthread> workers;
    for (int i = 1; i < threads; ++i) workers.emplace_back(work);
    work();
  }
  if (error != nullptr) std::rethrow_exception(error);
  return results;
}

class Generation {
 public:
  Generation(const GenerationOptions& options, const OutFolder& folder, ProgressReports& progress)
      : options_(options),
        folder_(folder.path()),
        threads_(options.threads > 0
                     ? options.threads
                     : std::max(1, static_cast<int>(std::thread::hardware_concurrency()))),
        progress_(progress) {}

  void add_images(CorpusManifest& manifest) {
    namespace images = generated_images;
    const std::vector<SplitRows> splits = splits_of(images::kTrain, images::kValid);
    progress_.begin("generate", splits.back().end * images::kBytes);
    for (const SplitRows& rows : splits) {
      CorpusManifest::Split& split = add_split(manifest, rows);
      CorpusManifest::Record image = image_record(images::kSide, images::kSide, images::kChannels);
      image.set_rows(rows.size());
      const std::int64_t shard_rows =
          options_.shard_images > 0 ? options_.shard_images : shard_format::shard_rows(image);
      const std::int64_t num_shards = (rows.size() + shard_rows - 1) / shard_rows;
      const auto shards = on_threads<Shard>(num_shards, threads_, [&](std::int64_t i) {
        const std::int64_t begin = rows.begin + i * shard_rows;
        const std::int64_t end = std::min(begin + shard_rows, rows.end);
        std::vector<char> values(static_cast<std::size_t>((end - begin) * images::kBytes));
        auto* out = reinterpret_cast<std::uint8_t*>(values.data());
        for (std::int64_t row = begin; row < end; ++row, out += images::kBytes)
          images::make_image(options_.seed, row, out);
        const Shard shard = write_shard(folder_, shard_file_name(rows.name, image.name(), i), image,
                                        values, /*ends=*/nullptr);
        report(std::ssize(values));
        return shard;
      });
      image.mutable_shard()->Assign(shards.begin(), shards.end());
      *split.add_record() = image;

      std::vector<std::string> class_names;
      for (std::int64_t i = 0; i < images::kClasses; ++i)
        class_names.push_back(fmt::format("class {}", i));
      RecordWriter writer(folder_, rows.name, label_record(class_names), kLabelShardRows);
      for (std::int64_t row = rows.begin; row < rows.end; ++row) {
        const std::uint16_t value = images::class_of(options_.seed, row);
        writer.append(&value, 1);
      }
      *split.add_record() = writer.finish();
    }
    progress_.end(true);
  }

  void add_text(CorpusManifest& manifest) {
    const std::string content = GeneratedText::vocabulary_file();
    CorpusManifest::Tokenizer& tokenizer = *manifest.mutable_tokenizer();
    tokenizer.set_kind("whitespace");
    tokenizer.set_vocabulary(GeneratedText::kEndOfSentence + 1);
    tokenizer.set_end_of_document(GeneratedText::kEndOfSentence);
    tokenizer.set_file(tokenizer_file_name(tokenizer.kind()));
    tokenizer.set_hash(xxh3_hex(content.data(), content.size()));
    write_file_durably(folder_ + "/" + tokenizer.file(), content);

    const GeneratedText text(options_.seed);
    const std::vector<SplitRows> splits = splits_of(GeneratedText::kTrain, GeneratedText::kValid);
    progress_.begin("generate", 0);
    for (const SplitRows& rows : splits) add_stream(add_split(manifest, rows), rows, text);
    progress_.end(true);
  }

 private:
  std::vector<SplitRows> splits_of(std::int64_t all_train, std::int64_t all_valid) const {
    const auto scaled = [&](std::int64_t rows) {
      return std::max<std::int64_t>(1, std::llround(options_.scale * static_cast<double>(rows)));
    };
    const std::int64_t train = scaled(all_train);
    return {{"train", 0, train}, {"valid", train, train + scaled(all_valid)}};
  }

  static CorpusManifest::Split& add_split(CorpusManifest& manifest, const SplitRows& rows) {
    CorpusManifest::Split& split = *manifest.add_split();
    split.set_name(rows.name);
    split.mutable_counts()->set_documents(rows.size());
    return split;
  }

  void report(std::int64_t bytes) {
    const std::lock_guard lock(progress_mutex_);
    progress_.add(bytes);
  }

  struct TextShard {
    Shard shard;
    std::int64_t words = 0, bytes = 0;
  };

  // Shards of as many tokens as prepare writes; they begin and end inside sentences. The lengths of
  // all sentences, which are cheap, come first: they say which sentences a shard has.
  void add_stream(CorpusManifest::Split& split, const SplitRows& rows, const GeneratedText& text) {
    constexpr std::int64_t kBlock = 1 << 14;
    const std::int64_t num_blocks = (rows.size() + kBlock - 1) / kBlock;
    std::vector<std::int64_t> starts =
        on_threads<std::int64_t>(num_blocks, threads_, [&](std::int64_t block) {
          std::int64_t tokens = 0;
          const std::int64_t begin = rows.begin + block * kBlock;
          for (std::int64_t row = begin; row < std::min(begin + kBlock, rows.end); ++row)
            tokens += text.length(row) + 1;
          return tokens;
        });
    starts.insert(starts.begin(), 0);
    for (std::size_t i = 1; i < starts.size(); ++i) starts[i] += starts[i - 1];

    CorpusManifest::Stream stream;
    stream.set_name("tokens");
    stream.set_dtype(shard_format::id_dtype(GeneratedText::kEndOfSentence + 1));
    stream.set_elements(starts.back());
    stream.set_documents(rows.size());
    const std::int64_t num_shards =
        (starts.back() + options_.shard_tokens - 1) / options_.shard_tokens;
    const auto shards = on_threads<TextShard>(num_shards, threads_, [&](std::int64_t i) {
      const std::int64_t begin = i * options_.shard_tokens;
      const std::int64_t end = std::min(begin + options_.shard_tokens, starts.back());
      const auto block = std::ranges::upper_bound(starts, begin) - starts.begin() - 1;
      return make_text_shard(stream, shard_file_name(rows.name, stream.name(), i), text,
                             {rows.begin + block * kBlock, starts[static_cast<std::size_t>(block)]},
                             begin, end);
    });
    CorpusManifest::Counts& counts = *split.mutable_counts();
    for (const TextShard& made : shards) {
      *stream.add_shard() = made.shard;
      counts.set_words(counts.words() + made.words);
      counts.set_bytes(counts.bytes() + made.bytes);
    }
    // A sentence's words are separated by spaces and end with the sentence.
    counts.set_bytes(counts.bytes() + counts.words() - rows.size());
    counts.set_characters(counts.bytes());
    counts.set_sentences(rows.size());
    counts.set_unknown_tokens(0);
    counts.set_unknown_bytes(0);
    *split.add_stream() = stream;
  }

  // Tokens [begin, end) of the stream. first: a sentence that begins at or before them, and where.
  TextShard make_text_shard(const CorpusManifest::Stream& stream, const std::string& file,
                            const GeneratedText& text, std::pair<std::int64_t, std::int64_t> first,
                            std::int64_t begin, std::int64_t end) {
    auto [row, at] = first;
    for (std::int64_t tokens = text.length(row) + 1; at + tokens <= begin;
         tokens = text.length(++row) + 1) {
      at += tokens;
    }
    std::vector<std::int32_t> ids;
    std::vector<std::uint64_t> ends;
    const std::int64_t start = at;
    while (at < end) {
      text.append_sentence(row++, ids);
      at = start + std::ssize(ids);
      if (at <= end) ends.push_back(static_cast<std::uint64_t>(at));
    }
    ids.erase(ids.begin() + (end - start), ids.end());
    ids.erase(ids.begin(), ids.begin() + (begin - start));
    TextShard made;
    for (const std::int32_t id : ids) {
      if (id == GeneratedText::kEndOfSentence) continue;
      ++made.words;
      made.bytes += GeneratedText::word_bytes(id);
    }
    const auto* bytes = reinterpret_cast<const char*>(ids.data());
    made.shard = write_shard(folder_, file, stream, {bytes, bytes + 4 * ids.size()}, &ends);
    report(4 * std::ssize(ids));
    return made;
  }

  const GenerationOptions& options_;
  const std::string folder_;
  const int threads_;
  ProgressReports& progress_;
  std::mutex progress_mutex_;
};

}  // namespace

const std::vector<std::string>& generated_names() {
  static const std::vector<std::string> kNames = {"imagenet64", "lm1b"};
  return kNames;
}

bool generate_corpus(const GenerationOptions& options,
                     const std::function<void(const PrepareProgress&)>& callback) {
  require(std::ranges::count(generated_names(), options.name) == 1, "the name of a data set");
  ProgressReports progress(callback, /*num_passes=*/1);
  return make_corpus(
      options.out,
      fmt::format("generated {}, scale {}, seed {}", options.name, options.scale, options.seed),
      [&](const OutFolder& folder, CorpusManifest& manifest) {
        Generation generation(options, folder, progress);
        options.name == "lm1b" ? generation.add_text(manifest) : generation.add_images(manifest);
      });
}

}  // namespace birkhoff
