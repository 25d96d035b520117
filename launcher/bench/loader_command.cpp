// The loader next to its floor: a loop of one thread, as the loader has one, that calls pread at
// each sample's offset and puts the bytes into the sample's slot in the memory of a batch (ids as
// int64), in the same order. It has as many batches as a loader, whose batches stay valid while the
// next ones are read. Both read from the page cache, or with --cold both from the disk. Rounds of
// both alternate.
//
// Start-up: sparse shards, which are hard links to one file; their manifest declares 10^12 tokens.
#include <fmt/format.h>

#include <algorithm>
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
#include "cluster/base/gpu/device.h"
#include "data/corpus/manifest.h"
#include "data/corpus/shard_format.h"
#include "data/loader/loader.h"
#include "data/loader/sampler.h"
#include "data/loader/token_windows.h"
#include "data/prepare/prepare.h"
#include "launcher/bench/measured_samples.h"
#include "launcher/bench/other_load.h"
#include "launcher/commands.h"
#include "launcher/measure/report.h"
#include "launcher/processes/scratch_folder.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using configs::CorpusManifest;

constexpr std::int64_t kBatch = 64;
// A round from the page cache ends after as many bytes or batches, one from the disk after as many
// samples.
constexpr std::int64_t kRoundBytes = 256 << 20, kRoundBatches = 4096, kColdSamples = 20'000;
constexpr std::int64_t kManyTokens = 1'000'000'000'000, kManyShards = 1000;
constexpr std::uint64_t kSeed = 1;

struct Seconds {
  double wall = 0, here = 0, elsewhere = 0;  // CPU time of this thread, of all other threads
  void add(const Seconds& more) {
    wall += more.wall;
    here += more.here;
    elsewhere += more.elsewhere;
  }
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

constexpr LoaderOptions kLoading{.batches = {.global_batch = kBatch, .seed = kSeed}};

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

// The order in which a loader takes samples, over all epochs.
class Order {
 public:
  explicit Order(std::int64_t per_epoch) : per_epoch_(per_epoch) {}
  std::int64_t at(std::int64_t position) {
    const std::int64_t epoch = position / per_epoch_;
    if (!order_ || epoch != epoch_) order_.emplace(kSeed, epoch_ = epoch, per_epoch_);
    return order_->at(position % per_epoch_);
  }

 private:
  const std::int64_t per_epoch_;
  std::optional<Sampler> order_;
  std::int64_t epoch_ = 0;
};

// The loader and the plain loop over the same samples, one after the other.
class Readers {
 public:
  explicit Readers(const MeasuredSamples& samples)
      : samples_(samples),
        order_(samples.num_samples),
        plain_(samples),
        batches_(static_cast<std::size_t>(kSlots * plain_.out_bytes())) {
    restart();
  }

  // A new loader at the first sample, which checks every page again.
  void restart() {
    loader_.emplace(samples_.make_source(), kLoading, /*consumed=*/0);
    consumed_ = 0;
  }

  // Compares the next samples with the files. Error(kInternal) names the first that differs.
  void check(std::int64_t batches) {
    for (std::int64_t i = 0; i < batches; ++i) {
      const Batch batch = loader_->next();
      for (std::int64_t row = 0; row < kBatch; ++row) {
        plain_.read(order_.at(consumed_++), batches_.data());
        samples_.check_row(batch, row, batches_.data());
      }
    }
  }

  struct Round {
    Seconds plain, loader;
    void add(const Round& more) {
      plain.add(more.plain);
      loader.add(more.loader);
    }
  };
  // before: called before each of the two, outside the time.
  Round measure(std::int64_t batches, bool plain_first, const std::function<void()>& before = {}) {
    std::vector<std::int64_t> samples;
    for (std::int64_t i = 0; i < batches * kBatch; ++i) samples.push_back(order_.at(consumed_ + i));
    consumed_ += batches * kBatch;
    Round round;
    const auto read_plainly = [&] {
      if (before) before();
      round.plain = timed([&] {
        std::int64_t row = 0;
        for (const std::int64_t sample : samples)
          plain_.read(sample, batches_.data() + row++ % kSlots * plain_.out_bytes());
      });
    };
    const auto load = [&] {
      if (before) before();
      round.loader = timed([&] {
        for (std::int64_t i = 0; i < batches; ++i) loader_->next();
      });
    };
    // The second reader finds rows in the CPU's cache, so the readers take turns at being second.
    if (plain_first) read_plainly();
    load();
    if (!plain_first) read_plainly();
    return round;
  }

 private:
  const MeasuredSamples& samples_;
  Order order_;
  std::int64_t consumed_ = 0;
  std::optional<TrainLoader> loader_;
  PlainReader plain_;
  static constexpr std::int64_t kSlots = kBatch * (kLoading.prefetch + 3);
  std::vector<char> batches_;
};

// The rows of the report for rounds of `batches` batches each.
std::string speed_rows(const std::vector<Readers::Round>& rounds, const std::string& which,
                       std::int64_t batches, std::int64_t sample_bytes) {
  const auto samples = static_cast<double>(batches * kBatch);
  const auto row = [&](const std::string& name, const auto& seconds_of, const auto& cpu_of) {
    std::vector<double> wall, cpu;
    for (const Readers::Round& round : rounds) {
      wall.push_back(samples / seconds_of(round));
      cpu.push_back(1e6 * cpu_of(round) / samples);
    }
    return table_row({name + which, figure(median(wall)),
                      figure(median(wall) * static_cast<double>(sample_bytes) / 1e6),
                      figure(median(cpu))});
  };
  std::vector<double> wall_ratio, cpu_ratio;
  for (const auto& [plain, loader] : rounds) {
    wall_ratio.push_back(plain.wall / loader.wall);
    cpu_ratio.push_back(plain.here / loader.elsewhere);
  }
  using Round = Readers::Round;
  return row(
             "floor: plain pread loop", [](const Round& r) { return r.plain.wall; },
             [](const Round& r) { return r.plain.here; }) +
         row(
             "TrainLoader", [](const Round& r) { return r.loader.wall; },
             [](const Round& r) { return r.loader.elsewhere; }) +
         table_row({"ratio" + which, figure(median(wall_ratio)), figure(median(wall_ratio)),
                    figure(median(cpu_ratio))});
}

// From the page cache: an epoch whose pages are not checked yet, an epoch of checked pages, then
// rounds of them.
void measure_warm(const MeasuredSamples& samples, int rounds, std::ostream& out) {
  const std::int64_t epoch = std::max<std::int64_t>(1, samples.num_samples / kBatch);
  const std::int64_t batches =
      std::clamp<std::int64_t>(kRoundBytes / (kBatch * samples.bytes()), 1, kRoundBatches);
  Readers readers(samples);
  readers.check(epoch + 1);  // the last batch spans two epochs
  readers.restart();
  const auto measure_epoch = [&] {
    Readers::Round whole;
    const std::int64_t parts = std::clamp<std::int64_t>(epoch / batches, 1, 16);
    for (std::int64_t i = 0; i < parts; ++i) {
      const std::int64_t part = epoch * (i + 1) / parts - epoch * i / parts;
      whole.add(readers.measure(part, /*plain_first=*/i % 2 == 0));
    }
    return whole;
  };
  const Readers::Round first = measure_epoch(), second = measure_epoch();
  std::vector<Readers::Round> later;
  for (int i = 0; i < rounds; ++i)
    later.push_back(readers.measure(batches, /*plain_first=*/i % 2 == 0));
  out << fmt::format(
             "\nEvery sample of an epoch matched the files. {} samples, {}, batches of {}, from the "
             "page cache: an epoch that checks every page, the next epoch, then medians of {} "
             "interleaved rounds of {} batches; ratio: speed of the loader over the loop's.\n\n",
             samples.num_samples, samples.what, kBatch, rounds, batches)
      << table_head({"", "samples/s", "MB/s", "us of CPU per sample"})
      << speed_rows({first}, ", first epoch", epoch, samples.bytes())
      << speed_rows({second}, ", second epoch", epoch, samples.bytes())
      << speed_rows(later, "", batches, samples.bytes());
}

// From the disk: each round drops the shards from the page cache before each reader.
void measure_cold(const MeasuredSamples& samples, int rounds, std::ostream& out) {
  const std::int64_t batches =
      std::max<std::int64_t>(1, std::min(kColdSamples, samples.num_samples) / kBatch);
  Readers readers(samples);
  double stayed = 0;
  std::vector<Readers::Round> cold;
  for (int i = 0; i < rounds; ++i) {
    readers.restart();
    cold.push_back(readers.measure(batches, /*plain_first=*/i % 2 == 0, [&] {
      stayed = std::max(stayed, drop_from_cache(samples.files));
    }));
  }
  readers.restart();
  readers.check(batches);
  out << fmt::format(
             "\n{} samples, {}, batches of {}, from the disk: medians of {} interleaved rounds of "
             "{} batches, whose samples matched the files; ratio: speed of the loader over the "
             "loop's.{}\n\n",
             samples.num_samples, samples.what, kBatch, rounds, batches,
             stayed > 0.01
                 ? fmt::format(" {:.0f} % of the pages stayed in the page cache.", 100 * stayed)
                 : "")
      << table_head({"", "samples/s", "MB/s", "us of CPU per sample"})
      << speed_rows(cold, "", batches, samples.bytes());
}

MeasuredSamples samples_to_measure(const Corpus& corpus, const BenchLoaderArguments& arguments) {
  if (arguments.record.empty() && corpus.split("train").stream_size() > 0)
    return measured_windows(corpus, arguments.length.value_or(1024));
  if (arguments.length) {
    fail(ExitCode::kUsage,
         "--length {}: split 'train' of {} has no tokens, so rows of a record are read; leave it "
         "out",
         *arguments.length, corpus.folder().string());
  }
  return measured_rows(corpus, arguments.record);
}

// From the opening of the corpus to its first batch.
double first_batch_seconds(const fs::path& folder, const BenchLoaderArguments& arguments) {
  if (arguments.cold) drop_from_cache(samples_to_measure(Corpus(folder), arguments).files);
  const double start = clock_seconds();
  const Corpus corpus(folder);
  TrainLoader loader(samples_to_measure(corpus, arguments).make_source(), kLoading, 0);
  loader.next();
  return clock_seconds() - start;
}

// Makes a corpus of zeros that takes no disk space.
void make_sparse_corpus(const fs::path& folder) {
  const std::int64_t elements = kManyTokens / kManyShards, bytes = 2 * elements;
  constexpr std::int64_t kPageBytes = shard_format::kPageBytes;
  const std::int64_t pages = shard_format::num_pages(bytes, kPageBytes);
  const std::vector<char> page(kPageBytes);
  const std::int64_t last_bytes = bytes - (pages - 1) * kPageBytes;
  std::vector<std::uint32_t> table(static_cast<std::size_t>(pages),
                                   crc32c(page.data(), page.size()));
  table.back() = crc32c(page.data(), static_cast<std::size_t>(last_bytes));
  const std::size_t table_bytes = table.size() * sizeof table[0];

  CorpusManifest manifest = new_manifest();
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
    shard.set_file(shard_file_name("train", "tokens", i));
    fs::create_hard_link(one, folder / shard.file());
    shard.set_hash(std::string(32, '0'));
    shard.set_bytes(bytes + static_cast<std::int64_t>(table_bytes));
    shard.set_elements(elements);
    shard.set_documents(0);
    shard.set_values_offset(0);
    shard.set_values_bytes(bytes);
    shard.set_documents_offset(bytes);
    shard.set_documents_bytes(0);
    shard.set_page_bytes(kPageBytes);
    shard.set_page_crcs_offset(bytes);
    shard.set_page_crcs_bytes(static_cast<std::int64_t>(table_bytes));
    shard.set_page_crcs_crc(crc32c(table.data(), table_bytes));
  }
  write_file_durably((folder / kCorpusManifestName).string(), manifest_json(manifest));
}

void measure_start(const fs::path& folder, std::ostream& out) {
  constexpr int kRounds = 5;
  const WindowOptions windows{.sequence_length = 1024};
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
    const Sampler order(kSeed, 0, num_training_windows(corpus, windows));
    sum += order.at(0);
    const double ordered = clock_seconds();
    TrainLoader loader(training_windows(corpus, windows), kLoading, 0);
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
  const fs::path folder =
      arguments.corpus.empty() ? prepare_corpus_in(scratch.path()) : fs::path(arguments.corpus);
  const double first_batch = first_batch_seconds(folder, arguments);
  const std::string memory = memory_report(at::kCPU);
  const Corpus corpus(folder);
  const MeasuredSamples samples = samples_to_measure(corpus, arguments);
  out << report_title(arguments.line);
  OtherLoad other_load;
  other_load.begin();
  if (arguments.cold) {
    measure_cold(samples, arguments.rounds, out);
  } else {
    measure_warm(samples, arguments.rounds, out);
  }
  other_load.end();
  out << other_load.note()
      << fmt::format(
             "\nFirst batch: {} ms after the corpus was opened. Memory after it: {}. At the end: "
             "{}.\n",
             figure(1e3 * first_batch), memory, memory_report(at::kCPU));
  if (arguments.corpus.empty()) measure_start(scratch.path() / "sparse", out);
  return 0;
}

}  // namespace birkhoff
