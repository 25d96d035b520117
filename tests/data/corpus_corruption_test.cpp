// Damage to corpora: flipped bits, wrong lengths, damaged blocks, misplaced files. Verification
// refuses all of it and names file and page. Training refuses the damage that it would read. The
// HDF5 library never sees a damaged file. BIRKHOFF_CORRUPTION=all tries every bit and length.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <optional>

#include "data/corpus/corpus.h"
#include "data/corpus/manifest.h"
#include "data/corpus/shard_format.h"
#include "data/corpus/shard_reader.h"
#include "data/corpus/verify.h"
#include "data/loader/loader.h"
#include "data/loader/token_windows.h"
#include "tests/cluster/base/corruption.h"
#include "tests/cluster/base/tally.h"
#include "tests/data/helpers.h"
#include "tests/data/prepare_helpers.h"

namespace {

// How often the library opened a file, in this process and in child processes.
struct OpenedFiles {
  std::atomic<int> total = 0, in_this_process = 0;
};
OpenedFiles& opened_files() {
  static OpenedFiles* const kShared =
      new (::mmap(nullptr, sizeof(OpenedFiles), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                  -1, 0)) OpenedFiles;
  return *kShared;
}
const pid_t kThisProcess = ::getpid();

}  // namespace

// Replaces the library's own function, with its types as the linker sees them.
extern "C" std::int64_t H5Fopen(const char* name, unsigned flags, std::int64_t access) {
  ++opened_files().total;
  opened_files().in_this_process += ::getpid() == kThisProcess;
  using Open = std::int64_t (*)(const char*, unsigned, std::int64_t);
  return reinterpret_cast<Open>(::dlsym(RTLD_NEXT, "H5Fopen"))(name, flags, access);
}

namespace birkhoff {
namespace {

using configs::CorpusManifest;
using testing::AnyOf;
using testing::HasSubstr;

struct Read {
  std::vector<std::int32_t> tokens;
  std::vector<std::int64_t> ends, labels;
  friend bool operator==(const Read&, const Read&) = default;
};

class CorpusCorruption : public testing::Test {
 protected:
  // A corpus with labels, from tables of one row; its documents are made of `characters`. The sizes
  // do not depend on the characters.
  void prepare(const std::string& name, const std::string& characters, int num_documents,
               int document_bytes, std::int64_t shard_tokens) const {
    std::mt19937 random(7);
    for (int i = 0; i < num_documents; ++i) {
      std::string text;
      while (static_cast<int>(text.size()) < document_bytes)
        text += characters[random() % characters.size()];
      const std::string row = fmt::format("{}\t{}\n", text, i % 2 == 0 ? "even" : "odd");
      write_text(folder_ / fmt::format("in-{}/{:03}", name, i), row);
    }
    PrepareOptions options = prepare_options(folder_ / name, {folder_ / ("in-" + name)}, "chars");
    options.table = TableColumns{"1", "2"};
    options.valid_fraction = 0.25;
    options.shard_tokens = shard_tokens;
    prepare_corpus(options);
  }
  // 32 KiB in two splits.
  void prepare_small(const std::string& name, const std::string& characters = "abcdef") const {
    prepare(name, characters, 4, 4700, 16 << 20);
  }

  // Why the corpus is refused, or empty if it is not. HDF5 must not have opened a corpus that is
  // refused.
  std::string refusal(const std::string& name) const {
    const int opened = opened_files().total;
    const std::string what = refusal_of([&] { verify_corpus(Corpus(folder_ / name)); });
    EXPECT_TRUE(what.empty() || opened_files().total == opened) << "HDF5 saw: " << what;
    return what;
  }
  static std::string refusal_of(const std::function<void()>& body) {
    try {
      body();
      return "";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kData) << error.what();
      EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
      return error.what();
    }
  }

  // What training can read of a split, without verification.
  static Read read(const Corpus& corpus, const std::string& split) {
    Read result;
    result.tokens = tokens_of(corpus, split);
    StreamReader reader(corpus, split, "tokens");
    result.ends = reader.document_ends(0, reader.elements());
    result.labels = labels_of(corpus, split);
    return result;
  }

  // The split and the shard of that file.
  static std::pair<std::string, std::optional<CorpusManifest::Shard>> shard_of(
      const Corpus& corpus, const std::string& file) {
    for (const auto& split : corpus.manifest().split()) {
      for (const auto* shards : {&split.stream(0).shard(), &split.record(0).shard()}) {
        for (const auto& shard : *shards) {
          if (shard.file() == file) return {split.name(), shard};
        }
      }
    }
    return {"", std::nullopt};
  }

  // The part of the message that names the location if byte `at` of a shard is damaged.
  static std::string place_of(const CorpusManifest::Shard& shard, std::int64_t at) {
    const auto in = [at](std::int64_t offset, std::int64_t bytes) {
      return at >= offset && at < offset + bytes;
    };
    const std::int64_t page_bytes = shard_format::page_bytes(shard);
    if (in(shard.values_offset(), shard.values_bytes())) {
      const bool is_record = shard.documents() == 0;
      return fmt::format("page {} of /{}", (at - shard.values_offset()) / page_bytes,
                         is_record ? "values" : "tokens");
    }
    if (in(shard.documents_offset(), shard.documents_bytes()))
      return fmt::format("page {} of /document_ends", (at - shard.documents_offset()) / page_bytes);
    if (in(shard.page_crcs_offset(), shard.page_crcs_bytes())) return "page table";
    return "";
  }

  TemporaryFolder folder_;
};

TEST_F(CorpusCorruption, EveryBitIsCovered) {
  prepare_small("corpus");
  const Corpus good(folder_ / "corpus");
  std::int64_t bytes = 0;
  Tally tally("bits of a corpus");
  for (const std::string& name : list_directory(folder_ / "corpus")) {
    const std::string file = folder_ / ("corpus/" + name);
    const auto [split, shard] = shard_of(good, name);
    const Read expected = shard ? read(good, split) : Read();
    bytes += file_size(file);
    for (const std::int64_t bit : places_to_try(8 * file_size(file))) {
      tally.attempt([&, &split = split, &shard = shard] {
        flip_bit(file, bit);
        const std::string what = refusal("corpus");
        EXPECT_THAT(what, HasSubstr(file)) << "bit " << bit;
        if (shard) {
          const std::string place = place_of(*shard, bit / 8);
          EXPECT_THAT(what, HasSubstr(place.empty() ? "hash" : place)) << "bit " << bit;
          // Training reads by offsets, so bytes outside the data sets do not matter to it.
          Read seen;
          const std::string refused = refusal_of([&] { seen = read(good, split); });
          EXPECT_THAT(refused, HasSubstr(place)) << "bit " << bit;
          EXPECT_EQ(refused.empty(), place.empty()) << "bit " << bit;
          EXPECT_TRUE(!refused.empty() || seen == expected) << "bit " << bit;
        } else {
          EXPECT_NE(refusal_of([&] { Corpus(folder_ / "corpus"); }), "") << "bit " << bit;
        }
        flip_bit(file, bit);
      });
    }
  }
  EXPECT_NEAR(static_cast<double>(bytes), 32768, 4096);
}

// Undamaged files pass, and the library opens each of them once, in its own process.
TEST_F(CorpusCorruption, Hdf5SeesWhatHasBeenCheckedInAChild) {
  prepare_small("corpus");
  const int total = opened_files().total, here = opened_files().in_this_process;
  EXPECT_EQ(refusal("corpus"), "");
  EXPECT_EQ(opened_files().total, total + 4);  // tokens and labels of two splits
  EXPECT_EQ(opened_files().in_this_process, here);
}

TEST_F(CorpusCorruption, EveryLengthIsCovered) {
  prepare_small("corpus");
  Tally tally("lengths of a corpus' files");
  for (const std::string& name : list_directory(folder_ / "corpus")) {
    const std::string file = folder_ / ("corpus/" + name), good = read_text(file);
    const auto expect_refused = [&] {
      EXPECT_THAT(refusal("corpus"), HasSubstr(file));
      EXPECT_NE(refusal_of([&] { Corpus(folder_ / "corpus"); }), "");
    };
    std::vector<std::int64_t> lengths = places_to_try(static_cast<std::int64_t>(good.size()));
    std::reverse(lengths.begin(), lengths.end());
    for (const std::int64_t length : lengths) {
      tally.attempt([&] {
        std::filesystem::resize_file(file, static_cast<std::uintmax_t>(length));
        expect_refused();
      });
    }
    for (const std::string& more : {std::string(1, '\0'), std::string("\n"), good}) {
      tally.attempt([&] {
        write_text(file, good + more);
        expect_refused();
      });
    }
    write_text(file, good);
  }
  EXPECT_EQ(refusal("corpus"), "");
}

// Every file is one that this program wrote, complete, but it belongs elsewhere.
TEST_F(CorpusCorruption, FilesInOtherPlaces) {
  prepare("corpus", "abcdef", 8, 1000, 1500);
  prepare("other", "uvwxyz", 8, 1000, 1500);
  const Corpus good(folder_ / "corpus");
  Tally tally("files of other shards, splits and corpora");
  const auto try_file = [&](const std::string& name, const std::string& from) {
    const std::string file = folder_ / ("corpus/" + name);
    const std::string mine = read_text(file), bad = read_text(folder_ / from);
    if (bad == mine) return;
    tally.attempt([&, &name = name] {
      write_text(file, bad);
      // A manifest of another corpus is valid, but the files next to it are not those it lists.
      EXPECT_THAT(refusal("corpus"),
                  HasSubstr(name == "manifest.json" ? folder_ / "corpus/" : file))
          << from;
      // Training does not read a single token.
      const std::string split = name.substr(0, name.find('-'));
      EXPECT_NE(refusal_of([&] {
                  const Corpus corpus(folder_ / "corpus");
                  read(corpus, corpus.has_split(split) ? split : "train");
                }),
                "")
          << name << " from " << from;
      write_text(file, mine);
    });
  };
  const std::vector<std::string> names = list_directory(folder_ / "corpus");
  for (const std::string& name : names) {
    try_file(name, "other/" + name);
    for (const std::string& from : names) {
      if (name.ends_with(".h5") && from.ends_with(".h5")) try_file(name, "corpus/" + from);
    }
  }
  EXPECT_GT(tally.tried(), 20);
  EXPECT_EQ(refusal("corpus"), "");
}

// Fletcher's checksum, which HDF5 uses, does not distinguish the words 0x0000 and 0xFFFF.
TEST_F(CorpusCorruption, WordsThatFletcherTakesForTheSame) {
  prepare_small("corpus");
  const Corpus good(folder_ / "corpus");
  const auto& shard = good.stream("train", "tokens").shard(0);
  const std::string file = folder_ / ("corpus/" + shard.file()), bytes = read_text(file);
  Tally tally("words 0x0000 turned to 0xFFFF");
  const auto turn = [&](std::int64_t offset, std::int64_t size) {
    for (std::int64_t at = offset; at < offset + size; at += 2) {
      const auto place = static_cast<std::size_t>(at);
      if (bytes.compare(place, 2, std::string(2, '\0')) != 0) continue;
      tally.attempt([&] {
        std::string bad = bytes;
        write_text(file, bad.replace(place, 2, "\xff\xff"));
        EXPECT_THAT(refusal("corpus"), HasSubstr(place_of(shard, at)));
        EXPECT_THAT(refusal_of([&] { read(good, "train"); }), HasSubstr(place_of(shard, at)));
      });
    }
  };
  turn(shard.values_offset(), std::min<std::int64_t>(shard.values_bytes(), 4000));
  turn(shard.documents_offset(), shard.documents_bytes());
  EXPECT_GT(tally.tried(), 50);
}

// Damage to a corpus of more than 1 MiB: verification refuses it, and a loader never returns a
// batch with damaged tokens.
TEST_F(CorpusCorruption, RandomDamageOfALargeOne) {
  prepare("corpus", "abcdefghijklmnop", 12, 100000, 250000);
  const Corpus good(folder_ / "corpus");
  WindowOptions windows;
  windows.sequence_length = 1024;
  LoaderOptions options;
  options.batches.global_batch = 16;
  options.batches.seed = 3;
  const std::int64_t batches = num_training_windows(good, windows) / options.batches.global_batch;
  std::vector<at::Tensor> expected;
  {
    TrainLoader loader(training_windows(good, windows), options, 0);
    for (std::int64_t i = 0; i < batches; ++i) expected.push_back(loader.next().at(field::kInputs));
  }
  std::vector<std::pair<std::string, std::string>> files;  // name, content
  std::size_t bytes = 0;
  for (const std::string& name : list_directory(folder_ / "corpus")) {
    files.emplace_back(name, read_text(folder_ / ("corpus/" + name)));
    bytes += files.back().second.size();
  }
  ASSERT_GT(bytes, std::size_t{1} << 20);
  std::mt19937 random(1);
  Tally tally("random damages of a large corpus");
  for (int i = 0; i < num_random_damages(); ++i) {
    const auto& [name, content] = files[random() % files.size()];
    tally.attempt([&, &name = name, &content = content] {
      const std::string file = folder_ / ("corpus/" + name);
      write_text(file, damaged(content, random));
      EXPECT_THAT(refusal("corpus"), HasSubstr(file));
      refusal_of([&] {
        TrainLoader loader(training_windows(Corpus(folder_ / "corpus"), windows), options, 0);
        for (const at::Tensor& inputs : expected)
          ASSERT_TRUE(loader.next().at(field::kInputs).equal(inputs)) << name;
      });
      write_text(file, content);
    });
  }
  EXPECT_EQ(refusal("corpus"), "");
}

// A manifest from before manifests had a checksum is still read, and its fields are checked one by
// one: a manifest that is accepted yields the same tokens.
TEST_F(CorpusCorruption, BitsOfAManifestWithoutAChecksum) {
  prepare_small("corpus");
  const Corpus good(folder_ / "corpus");
  const Read train = read(good, "train"), valid = read(good, "valid");
  const std::string file = folder_ / "corpus/manifest.json";
  const std::string sealed = read_text(file);
  const std::string bare = "{" + sealed.substr(sealed.find(",\n") + 1);
  write_text(file, bare);
  ASSERT_EQ(refusal("corpus"), "");
  Tally tally("bits of a manifest without a checksum");
  int harmless = 0;
  for (std::int64_t bit = 0; bit < 8 * file_size(file); bit += all_corruption() ? 1 : 53) {
    tally.attempt([&] {
      flip_bit(file, bit);
      const std::string what = refusal_of([&] { verify_corpus(Corpus(folder_ / "corpus")); });
      if (what.empty()) {
        ++harmless;
        const Corpus corpus(folder_ / "corpus");
        EXPECT_EQ(corpus.manifest().fingerprint(), good.manifest().fingerprint());
        EXPECT_TRUE(read(corpus, "train") == train && read(corpus, "valid") == valid);
      }
      flip_bit(file, bit);
    });
  }
  // The harmless bits are those of the source, which only a later prepare reads.
  EXPECT_LT(harmless, tally.tried() / 2);
  fmt::print("harmless {}\n", harmless);
}

}  // namespace
}  // namespace birkhoff
