// The training loader against the plainest reader of the same rows, and its start-up on a corpus of
// 10^12 tokens. Usage: loader_bench [--corpus DIR] [--shards N] [--folder SCRATCH].
//
// Rows: T = 1024, 64 a batch, one rank, page checksums checked before. The floor is a loop that for
// each row calls pread at the row's offset and widens its tokens to int64 into its place in a
// batch's memory, in the same order, from the page cache as the loader does. Rounds of both
// alternate; medians are printed (of the rounds' ratios, too), of wall time and of the processor
// time of the thread that reads. Without --corpus 64 MB of random bytes are prepared.
//
// Start-up: N (1000) sparse shards, hard links of one file, whose manifest says 10^12 tokens.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "cluster/base/checksum.h"
#include "cluster/base/error.h"
#include "cluster/base/file.h"
#include "data/loader.h"
#include "data/manifest.h"
#include "data/order.h"
#include "data/prepare.h"
#include "data/shard_format.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using configs::CorpusManifest;

constexpr std::int64_t kLength = 1024, kBatch = 64;
constexpr std::uint64_t kSeed = 1;

double wall_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double processor_seconds(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Seconds {
  double wall = 0, here = 0, elsewhere = 0;  // processor time of this thread, of the others
};

Seconds timed(const std::function<void()>& work) {
  const auto now = [] {
    const double here = processor_seconds(CLOCK_THREAD_CPUTIME_ID);
    return Seconds{wall_seconds(), here, processor_seconds(CLOCK_PROCESS_CPUTIME_ID) - here};
  };
  const Seconds start = now();
  work();
  const Seconds end = now();
  return {end.wall - start.wall, end.here - start.here, end.elsewhere - start.elsewhere};
}

LoaderOptions loader_options() {
  LoaderOptions options;
  options.sequence_length = kLength;
  options.global_batch = kBatch;
  options.seed = kSeed;
  return options;
}

// Files and offsets of a stream, and nothing else: no checksum, no range of ids, no batch.
class PlainReader {
 public:
  explicit PlainReader(const Corpus& corpus) {
    const auto& stream = corpus.stream("train", "tokens");
    width_ = shard_format::dtype_bytes(stream.dtype());
    for (const auto& shard : stream.shard()) {
      const int fd = ::open((corpus.folder() / shard.file()).c_str(), O_RDONLY);
      require(fd >= 0, "a shard to open");
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

  // Tokens [first, first + kLength] widened into out.
  void read(std::int64_t first, std::int64_t* out) {
    for (std::int64_t done = 0; done <= kLength;) {
      while (first + done >= shards_[at_].end) ++at_;
      while (first + done < shards_[at_].begin) --at_;
      const Shard& shard = shards_[at_];
      const std::int64_t count = std::min(kLength + 1 - done, shard.end - (first + done));
      const ssize_t got = ::pread(shard.fd, bytes_.data(), static_cast<std::size_t>(count * width_),
                                  shard.offset + (first + done - shard.begin) * width_);
      require(got == count * width_, "a whole row");
      if (width_ == 2) {
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

void measure_rows(const Corpus& corpus) {
  constexpr int kRounds = 20;
  constexpr std::int64_t kBatches = 2048;  // about a fifth of a second
  const std::int64_t per_epoch = samples_per_epoch(corpus, loader_options());
  TrainLoader loader(corpus, loader_options(), 0);
  std::int64_t consumed = 0;
  std::int64_t sum = 0;  // of tokens, so that no read is left out
  const auto load = [&](std::int64_t batches) {
    for (std::int64_t i = 0; i < batches; ++i) {
      const Batch batch = loader.next();
      sum += batch.at(field::kTargets).const_data_ptr<std::int64_t>()[kLength - 1];
    }
  };
  PlainReader plain(corpus);
  std::vector<std::int64_t> firsts, batch(kBatch * (kLength + 1));
  const auto read_plainly = [&] {
    std::int64_t row = 0;
    for (const std::int64_t first : firsts) {
      std::int64_t* out = batch.data() + row++ % kBatch * (kLength + 1);
      plain.read(first, out);
      sum -= out[0] == -1;
    }
  };
  const std::int64_t warm_up = (per_epoch + kBatch - 1) / kBatch + 1;
  load(warm_up);
  consumed += warm_up * kBatch;
  std::vector<double> loader_wall, plain_wall, loader_processor, plain_processor, wall_ratio,
      processor_ratio;
  for (int round = 0; round < kRounds; ++round) {
    firsts.clear();
    for (std::int64_t i = 0; i < kBatches * kBatch; ++i) {
      const std::int64_t sample = consumed + i;
      const SampleOrder order(kSeed, sample / per_epoch, per_epoch);
      firsts.push_back(order.at(sample % per_epoch) * kLength);
    }
    consumed += kBatches * kBatch;
    // The second one finds rows in the processor's cache: take turns.
    Seconds plainly, loading;
    if (round % 2 == 0) plainly = timed(read_plainly);
    loading = timed([&] { load(kBatches); });
    if (round % 2 == 1) plainly = timed(read_plainly);
    const double tokens = static_cast<double>(kBatches * kBatch * kLength);
    plain_wall.push_back(tokens / plainly.wall);
    loader_wall.push_back(tokens / loading.wall);
    plain_processor.push_back(plainly.here / tokens * 1e9);
    loader_processor.push_back(loading.elsewhere / tokens * 1e9);
    wall_ratio.push_back(plainly.wall / loading.wall);
    processor_ratio.push_back(plainly.here / loading.elsewhere);
  }
  fmt::print("rows of {} tokens, batches of {}, {} rounds of {} batches (checksum {})\n", kLength,
             kBatch, kRounds, kBatches, sum);
  fmt::print("  floor, plain pread loop: {:7.1f} million tokens/s, {:.3f} ns processor a token\n",
             median(plain_wall) / 1e6, median(plain_processor));
  fmt::print("  TrainLoader:             {:7.1f} million tokens/s, {:.3f} ns processor a token\n",
             median(loader_wall) / 1e6, median(loader_processor));
  fmt::print("  ratio {:.3f} of wall time, {:.3f} of processor time\n", median(wall_ratio),
             median(processor_ratio));
}

// A corpus of 10^12 zeros that takes no room.
void make_sparse_corpus(const fs::path& folder, std::int64_t num_shards) {
  const std::int64_t elements = 1'000'000'000'000 / num_shards, bytes = 2 * elements;
  const std::int64_t pages = shard_format::num_pages(bytes);
  std::string table;
  const std::vector<char> page(shard_format::kPageBytes);
  const auto add_crc = [&](std::int64_t size) {
    const std::uint32_t crc = crc32c(page.data(), static_cast<std::size_t>(size));
    table.append(reinterpret_cast<const char*>(&crc), sizeof crc);
  };
  const std::uint32_t whole = crc32c(page.data(), page.size());
  for (std::int64_t i = 0; i + 1 < pages; ++i) {
    table.append(reinterpret_cast<const char*>(&whole), sizeof whole);
  }
  add_crc(bytes - (pages - 1) * shard_format::kPageBytes);

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
  stream.set_elements(elements * num_shards);
  stream.set_documents(0);
  fs::create_directories(folder);
  const fs::path one = folder / "zeros";
  {
    std::ofstream file(one, std::ios::binary);
    file.seekp(bytes);
    file << table;
  }
  for (std::int64_t i = 0; i < num_shards; ++i) {
    auto& shard = *stream.add_shard();
    shard.set_file(fmt::format("train-tokens-{:05}.h5", i));
    fs::create_hard_link(one, folder / shard.file());
    shard.set_hash(std::string(32, '0'));
    shard.set_bytes(bytes + static_cast<std::int64_t>(table.size()));
    shard.set_elements(elements);
    shard.set_documents(0);
    shard.set_values_offset(0);
    shard.set_values_bytes(bytes);
    shard.set_documents_offset(bytes);
    shard.set_documents_bytes(0);
    shard.set_page_crcs_offset(bytes);
    shard.set_page_crcs_bytes(static_cast<std::int64_t>(table.size()));
    shard.set_page_crcs_crc(crc32c(table.data(), table.size()));
  }
  std::ofstream(folder / kManifestName) << manifest_json(manifest);
}

void measure_start(const fs::path& folder, std::int64_t num_shards) {
  constexpr int kRounds = 5;
  make_sparse_corpus(folder, num_shards);
  std::vector<double> text, opening, ordering, first_batch;
  const std::string manifest = (folder / kManifestName).string();
  for (int round = 0; round < kRounds; ++round) {
    const double start = wall_seconds();
    std::int64_t bytes = 0;
    for (const char c : read_file(manifest, shard_format::kManifestMaxBytes)) bytes += c == '{';
    const double read = wall_seconds();
    const Corpus corpus(folder);
    const double opened = wall_seconds();
    const SampleOrder order(kSeed, 0, samples_per_epoch(corpus, loader_options()));
    bytes += order.at(0);
    const double ordered = wall_seconds();
    TrainLoader loader(corpus, loader_options(), 0);
    loader.next();
    const double loaded = wall_seconds();
    require(bytes > 0, "an index");
    text.push_back((read - start) * 1e3);
    opening.push_back((opened - read) * 1e3);
    ordering.push_back((ordered - opened) * 1e3);
    first_batch.push_back((loaded - ordered) * 1e3);
  }
  fmt::print("start-up on 10^12 tokens in {} shards\n", num_shards);
  fmt::print("  floor, reading manifest.json of {} bytes: {:8.2f} ms\n", file_size(manifest),
             median(text));
  fmt::print("  Corpus, every shard's size checked:       {:8.2f} ms, ratio {:.1f}\n",
             median(opening), median(opening) / median(text));
  fmt::print("  order of the epoch and its first index:   {:8.4f} ms\n", median(ordering));
  fmt::print("  TrainLoader and its first batch:          {:8.2f} ms\n", median(first_batch));
}

int run(int argc, char** argv) {
  std::string corpus, scratch = fs::temp_directory_path() / "birkhoff_loader_bench";
  std::int64_t shards = 1000;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag == "--corpus") {
      corpus = argv[i + 1];
    } else if (flag == "--folder") {
      scratch = argv[i + 1];
    } else if (flag == "--shards") {
      shards = std::atoll(argv[i + 1]);
    } else {
      fail(ExitCode::kUsage, "{}: unknown; flags are --corpus, --shards, --folder", flag);
    }
  }
  fs::remove_all(scratch);
  fs::create_directories(scratch);
  if (corpus.empty()) corpus = prepare_corpus_in(scratch);
  measure_rows(Corpus(corpus));
  measure_start(fs::path(scratch) / "sparse", shards);
  fs::remove_all(scratch);
  return 0;
}

}  // namespace
}  // namespace birkhoff

int main(int argc, char** argv) {
  try {
    return birkhoff::run(argc, argv);
  } catch (const birkhoff::Error& error) {
    fmt::print(stderr, "loader_bench: {}\n", error.what());
    return static_cast<int>(error.code());
  }
}
