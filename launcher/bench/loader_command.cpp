// Rows: T = 1024, 64 per batch, one rank, page checksums checked beforehand. The floor is a loop
// that calls pread at each row's offset and widens the tokens to int64 into the row's slot in a
// batch's memory, in the same order and from the page cache, like the loader. Rounds of both
// alternate.
//
// Start-up: sparse shards, which are hard links to one file; their manifest declares 10^12 tokens.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "cluster/base/error.h"
#include "cluster/base/files/checksum.h"
#include "cluster/base/files/file.h"
#include "data/corpus/manifest.h"
#include "data/corpus/shard_format.h"
#include "data/loader/loader.h"
#include "data/loader/sampler.h"
#include "data/loader/token_windows.h"
#include "data/prepare/prepare.h"
#include "launcher/bench/other_load.h"
#include "launcher/commands.h"
#include "launcher/measure/report.h"
#include "launcher/processes/scratch_folder.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using configs::CorpusManifest;

constexpr std::int64_t kLength = 1024, kBatch = 64;
constexpr std::int64_t kRoundBatches = 2048;  // about a fifth of a second
constexpr std::int64_t kManyTokens = 1'000'000'000'000, kManyShards = 1000;
constexpr std::uint64_t kSeed = 1;

struct Seconds {
  double wall = 0, here = 0, elsewhere = 0;  // CPU time of this thread, of all other threads
};

Seconds timed(const std::function<void()>& work) {
  const auto now = [] {
    const double here = processor_seconds(CLOCK_THREAD_CPUTIME_ID);
    return Seconds{clock_seconds(), here, processor_seconds(CLOCK_PROCESS_CPUTIME_ID) - here};
  };
  const Seconds start = now();
  work();
  const Seconds end = now();
  return {end.wall - start.wall, end.here - start.here, end.elsewhere - start.elsewhere};
}

const WindowOptions kWindows{.sequence_length = kLength};
constexpr LoaderOptions kLoading{.global_batch = kBatch, .seed = kSeed};

// Files and offsets of a stream, and nothing else: no checksum, no range check of ids, no batch.
class PlainReader {
 public:
  explicit PlainReader(const Corpus& corpus) {
    const auto& stream = corpus.stream("train", "tokens");
    width_ = shard_format::dtype_bytes(stream.dtype());
    for (const auto& shard : stream.shard()) {
      const std::string path = corpus.folder() / shard.file();
      const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
      if (fd < 0) fail(ExitCode::kStorage, "open of '{}': {}", path, std::strerror(errno));
      shards_.push_back({fd, elements_, elements_ + shard.elements(), shard.values_offset()});
      elements_ += shard.elements();
    }
    bytes_.resize(static_cast<std::size_t>(width_ * (kLength + 1)));
  }
  ~PlainReader() {
    for (const Shard& shard : shards_) ::close(shard.fd);
  }
  PlainReader(const PlainReader&) = delete;
  PlainReader& operator=(const PlainReader&) = delete;

  // Reads the tokens [first, first + kLength] and widens them into out.
  void read(std::int64_t first, std::int64_t* out) {
    for (std::int64_t done = 0; done <= kLength;) {
      while (first + done >= shards_[at_].end) ++at_;
      while (first + done < shards_[at_].begin) --at_;
      const Shard& shard = shards_[at_];
      const std::int64_t count = std::min(kLength + 1 - done, shard.end - (first + done));
      const ssize_t got = ::pread(shard.fd, bytes_.data(), static_cast<std::size_t>(count * width_),
                                  shard.offset + (first + done - shard.begin) * width_);
      if (got != count * width_) {
        fail(ExitCode::kStorage, "pread of a shard returned {} of {} bytes: {}", got,
             count * width_, got < 0 ? std::strerror(errno) : "the file has become shorter");
      }
      if (width_ == 1) {
        const auto* ids = reinterpret_cast<const std::uint8_t*>(bytes_.data());
        std::copy(ids, ids + count, out + done);
      } else if (width_ == 2) {
        const auto* ids = reinterpret_cast<const std::uint16_t*>(bytes_.data());
        std::copy(ids, ids + count, out + done);
      } else {
        const auto* ids = reinterpret_cast<const std::int32_t*>(bytes_.data());
        std::copy(ids, ids + count, out + done);
      }
      done += count;
    }
  }

 private:
  struct Shard {
    int fd;
    std::int64_t begin, end, offset;
  };
  std::vector<Shard> shards_;
  std::size_t at_ = 0;
  std::int64_t width_ = 0, elements_ = 0;
  std::vector<char> bytes_;
};

// Prepares a corpus of 64 MB of random bytes.
fs::path prepare_corpus_in(const fs::path& folder) {
  const fs::path text = folder / "text";
  {
    std::mt19937_64 random(3);
    File file = File::create(text);
    std::vector<std::uint64_t> words(1 << 17);
    for (int i = 0; i < 64; ++i) {
      for (std::uint64_t& word : words) word = random();
      file.write_all(words.data(), words.size() * sizeof words[0]);
    }
    file.close();
  }
  PrepareOptions options;
  options.out = folder / "corpus";
  options.paths = {text};
  options.valid_fraction = 0;
  prepare_corpus(options);
  return options.out;
}

// The loader and the plain loop over the same positions, one after the other.
class RowReaders {
 public:
  explicit RowReaders(const Corpus& corpus)
      : per_epoch_(num_training_windows(corpus, kWindows)),
        loader_(training_windows(corpus, kWindows), kLoading, 0),
        plain_(corpus),
        batch_(kBatch * (kLength + 1)) {}

  // Compares every row of an epoch, token by token, which also checks the page checksums.
  // Error(kInternal) names the first token that differs.
  void check_epoch() {
    for (; consumed_ <= per_epoch_; consumed_ += kBatch) {
      const Batch batch = loader_.next();
      for (std::int64_t row = 0; row < kBatch; ++row) {
        plain_.read(first_token(consumed_ + row), batch_.data());
        check_row(batch.at(field::kInputs)[row], batch_.data(), consumed_ + row);
        check_row(batch.at(field::kTargets)[row], batch_.data() + 1, consumed_ + row);
      }
    }
  }

  struct Round {
    Seconds plain, loader;
  };
  Round measure(bool plain_first) {
    std::vector<std::int64_t> firsts;
    for (std::int64_t i = 0; i < kRoundBatches * kBatch; ++i) {
      firsts.push_back(first_token(consumed_ + i));
    }
    consumed_ += kRoundBatches * kBatch;
    const auto read_plainly = [&] {
      std::int64_t row = 0;
      for (const std::int64_t first : firsts) {
        plain_.read(first, batch_.data() + row++ % kBatch * (kLength + 1));
      }
    };
    const auto load = [&] {
      for (std::int64_t i = 0; i < kRoundBatches; ++i) loader_.next();
    };
    // The second reader finds rows in the CPU's cache, so the readers take turns at being second.
    Round round;
    if (plain_first) round.plain = timed(read_plainly);
    round.loader = timed(load);
    if (!plain_first) round.plain = timed(read_plainly);
    return round;
  }

 private:
  std::int64_t first_token(std::int64_t position) {
    const std::int64_t epoch = position / per_epoch_;
    if (!order_ || epoch != order_epoch_) order_.emplace(kSeed, order_epoch_ = epoch, per_epoch_);
    return order_->at(position % per_epoch_) * kLength;
  }

  static void check_row(const at::Tensor& tokens_T, const std::int64_t* expected,
                        std::int64_t position) {
    const auto* tokens = tokens_T.const_data_ptr<std::int64_t>();
    const auto* end = tokens + kLength;
    const auto [token, other] = std::mismatch(tokens, end, expected);
    if (token == end) return;
    fail(ExitCode::kInternal,
         "the loader returned token {} at position {} of sample {}, the files have {}", *token,
         token - tokens, position, *other);
  }

  std::int64_t per_epoch_, consumed_ = 0;
  std::optional<Sampler> order_;
  std::int64_t order_epoch_ = 0;
  TrainLoader loader_;
  PlainReader plain_;
  std::vector<std::int64_t> batch_;
};

void measure_rows(const Corpus& corpus, int rounds, std::ostream& out) {
  RowReaders readers(corpus);
  readers.check_epoch();
  std::vector<double> loader_wall, plain_wall, loader_processor, plain_processor, wall_ratio,
      processor_ratio;
  OtherLoad other_load;
  other_load.begin();
  for (int i = 0; i < rounds; ++i) {
    const auto [plain, loader] = readers.measure(/*plain_first=*/i % 2 == 0);
    constexpr double kTokens = kRoundBatches * kBatch * kLength;
    plain_wall.push_back(kTokens / plain.wall / 1e6);
    loader_wall.push_back(kTokens / loader.wall / 1e6);
    plain_processor.push_back(plain.here / kTokens * 1e9);
    loader_processor.push_back(loader.elsewhere / kTokens * 1e9);
    wall_ratio.push_back(plain.wall / loader.wall);
    processor_ratio.push_back(plain.here / loader.elsewhere);
  }
  other_load.end();
  out << fmt::format(
             "\nEvery row of an epoch matched the plain loop's tokens. Rows of {} tokens, batches "
             "of {}; medians of {} interleaved rounds of {} batches; ratio: speed of the loader "
             "over the loop's.\n\n",
             kLength, kBatch, rounds, kRoundBatches)
      << table_head({"", "million tokens/s", "ns of CPU per token"})
      << table_row({"floor: plain pread loop", figure(median(plain_wall)),
                    figure(median(plain_processor))})
      << table_row({"TrainLoader", figure(median(loader_wall)), figure(median(loader_processor))})
      << table_row({"ratio", figure(median(wall_ratio)), figure(median(processor_ratio))})
      << other_load.note();
}

// Makes a corpus of zeros that takes no disk space.
void make_sparse_corpus(const fs::path& folder) {
  const std::int64_t elements = kManyTokens / kManyShards, bytes = 2 * elements;
  constexpr std::int64_t kPageBytes = shard_format::kStreamPageBytes;
  const std::int64_t pages = shard_format::num_pages(bytes, kPageBytes);
  const std::vector<char> page(kPageBytes);
  const std::int64_t last_bytes = bytes - (pages - 1) * kPageBytes;
  std::vector<std::uint32_t> table(static_cast<std::size_t>(pages),
                                   crc32c(page.data(), page.size()));
  table.back() = crc32c(page.data(), static_cast<std::size_t>(last_bytes));
  const std::size_t table_bytes = table.size() * sizeof table[0];

  CorpusManifest manifest;
  manifest.set_format(shard_format::kManifestFormat);
  manifest.set_version(shard_format::kManifestVersion);
  manifest.mutable_tokenizer()->set_kind("bytes");
  manifest.mutable_tokenizer()->set_vocabulary(256);
  auto& split = *manifest.add_split();
  split.set_name("train");
  split.mutable_counts()->set_documents(0);
  auto& stream = *split.add_stream();
  stream.set_name("tokens");
  stream.set_dtype(CorpusManifest::u16);
  stream.set_elements(elements * kManyShards);
  stream.set_documents(0);
  fs::create_directories(folder);
  const fs::path one = folder / "zeros";
  File::create(one).close();
  fs::resize_file(one, static_cast<std::uintmax_t>(bytes));
  File shard_file = File::open_for_append(one);
  shard_file.write_all(table.data(), table_bytes);
  shard_file.close();
  for (std::int64_t i = 0; i < kManyShards; ++i) {
    auto& shard = *stream.add_shard();
    shard.set_file(fmt::format("train-tokens-{:05}.h5", i));
    fs::create_hard_link(one, folder / shard.file());
    shard.set_hash(std::string(32, '0'));
    shard.set_bytes(bytes + static_cast<std::int64_t>(table_bytes));
    shard.set_elements(elements);
    shard.set_documents(0);
    shard.set_values_offset(0);
    shard.set_values_bytes(bytes);
    shard.set_documents_offset(bytes);
    shard.set_documents_bytes(0);
    shard.set_page_crcs_offset(bytes);
    shard.set_page_crcs_bytes(static_cast<std::int64_t>(table_bytes));
    shard.set_page_crcs_crc(crc32c(table.data(), table_bytes));
  }
  write_file_durably((folder / kCorpusManifestName).string(), manifest_json(manifest));
}

void measure_start(const fs::path& folder, std::ostream& out) {
  constexpr int kRounds = 5;
  make_sparse_corpus(folder);
  std::vector<double> text, opening, ordering, first_batch;
  OtherLoad other_load;
  other_load.begin();
  const std::string manifest = (folder / kCorpusManifestName).string();
  for (int round = 0; round < kRounds; ++round) {
    const double start = clock_seconds();
    std::int64_t sum = 0;  // so that no read is optimized away
    for (const char c : read_file(manifest, shard_format::kManifestMaxBytes)) sum += c == '{';
    const double read = clock_seconds();
    const Corpus corpus(folder);
    const double opened = clock_seconds();
    const Sampler order(kSeed, 0, num_training_windows(corpus, kWindows));
    sum += order.at(0);
    const double ordered = clock_seconds();
    TrainLoader loader(training_windows(corpus, kWindows), kLoading, 0);
    loader.next();
    const double loaded = clock_seconds();
    require(sum > 0, "an index");
    text.push_back((read - start) * 1e3);
    opening.push_back((opened - read) * 1e3);
    ordering.push_back((ordered - opened) * 1e3);
    first_batch.push_back((loaded - ordered) * 1e3);
  }
  other_load.end();
  const auto row = [&](const std::string& what, const std::vector<double>& ms) {
    return table_row({what, figure(median(ms)), figure(median(ms) / median(text))});
  };
  out << fmt::format("\nStart-up on {} tokens in {} shards, medians of {}:\n\n", kManyTokens,
                     kManyShards, kRounds)
      << table_head({"", "ms", "time / floor"})
      << row(fmt::format("floor: reading manifest.json of {} bytes", file_size(manifest)), text)
      << row("Corpus, every shard's size checked", opening)
      << row("order of the epoch and its first index", ordering)
      << row("TrainLoader and its first batch", first_batch) << other_load.note();
}

}  // namespace

int bench_loader_command(const BenchLoaderArguments& arguments, std::ostream& out) {
  const ScratchFolder scratch("bench");
  const Corpus corpus(arguments.corpus.empty() ? prepare_corpus_in(scratch.path())
                                               : fs::path(arguments.corpus));
  out << report_title(arguments.line);
  measure_rows(corpus, arguments.rounds, out);
  measure_start(scratch.path() / "sparse", out);
  return 0;
}

}  // namespace birkhoff
