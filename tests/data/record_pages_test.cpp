// Pages of records: how much the first read of a row reads, corpora with pages of other sizes, and
// damage to images and points.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <thread>

#include "cluster/base/files/checksum.h"
#include "data/corpus/shard_reader.h"
#include "data/corpus/verify.h"
#include "tests/cluster/base/corruption.h"
#include "tests/cluster/base/tally.h"
#include "tests/data/record_helpers.h"

namespace birkhoff {
namespace {

using configs::CorpusManifest;
using testing::HasSubstr;

// Bytes that this process has read so far, by read() and pread(); nullopt if the system does not
// say.
std::optional<std::int64_t> bytes_read() {
  std::ifstream file("/proc/self/io");
  std::string name;
  std::int64_t bytes = 0;
  if (!(file >> name >> bytes) || name != "rchar:") return std::nullopt;
  return bytes;
}

std::string rows_of(ShardSequence& reader, const CorpusManifest::Record& record, std::int64_t from,
                    std::int64_t count) {
  std::string rows(static_cast<std::size_t>(count * shard_format::row_bytes(record)), '\0');
  reader.read_bytes(from, count, rows.data());
  return rows;
}

// Why a corpus is refused; empty if it is not.
std::string refusal_by(const std::function<void()>& body) {
  try {
    body();
    return "";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kData) << error.what();
    return error.what();
  }
}

TEST(RecordPages, TheFirstReadOfARowReadsAtMostAPageMoreAtEachEnd) {
  if (!bytes_read()) GTEST_SKIP() << "no /proc/self/io";
  TemporaryFolder folder;
  // 9,450 bytes a row: rows begin anywhere in a page.
  const std::string pixels = write_image_corpus(folder / "corpus", 100, 50, /*height=*/630);
  const Corpus corpus(folder / "corpus");
  const auto& record = corpus.record("train", "image");
  const std::int64_t row_bytes = shard_format::row_bytes(record);
  ASSERT_EQ(row_bytes, 9450);
  ShardSequence images(corpus, record);
  const auto cost_of = [&](std::int64_t row) {
    std::string bytes(static_cast<std::size_t>(row_bytes), '\0');
    const std::int64_t first = *bytes_read(), second = *bytes_read();
    images.read_bytes(row, 1, bytes.data());
    const std::int64_t third = *bytes_read();
    EXPECT_TRUE(pixels.compare(static_cast<std::size_t>(row * row_bytes), bytes.size(), bytes) == 0)
        << row;
    return (third - second) - (second - first);  // without the file that counts
  };
  // The first read of a shard also reads its page table, once.
  const std::int64_t table = record.shard(0).page_crcs_bytes();
  EXPECT_EQ(table, 4 * ((50 * 9450 + 4095) / 4096));
  EXPECT_LE(cost_of(7), table + row_bytes + 2 * 4096);
  for (const std::int64_t row : {20, 23, 41, 0, 49}) {
    EXPECT_LE(cost_of(row), row_bytes + 2 * 4096) << row;
    EXPECT_EQ(cost_of(row), row_bytes) << row << " again";
  }
  EXPECT_LE(cost_of(60), table + row_bytes + 2 * 4096);  // of the second shard
}

// Records written before pages had a size have those of 64 KiB.
TEST(RecordPages, ShardsWithPagesOf64KiBAreRead) {
  TemporaryFolder folder;
  const std::string pixels = write_image_corpus(folder / "corpus", 2000, 2000);
  const std::string file = folder / "corpus/train-image-00000.h5";
  edit_manifest(folder / "corpus", [&](CorpusManifest& manifest) {
    auto& shard = *manifest.mutable_split(0)->mutable_record(0)->mutable_shard(0);
    ASSERT_EQ(shard.page_bytes(), 4096);
    // Two pages of 64 KiB: the table shrinks in place.
    std::string bytes = read_text(file);
    const std::uint32_t crcs[2] = {crc32c(pixels.data(), 65536),
                                   crc32c(pixels.data() + 65536, pixels.size() - 65536)};
    bytes.replace(static_cast<std::size_t>(shard.page_crcs_offset()), 8,
                  reinterpret_cast<const char*>(crcs), 8);
    write_text(file, bytes);
    shard.clear_page_bytes();
    shard.set_page_crcs_bytes(8);
    shard.set_page_crcs_crc(crc32c(crcs, 8));
  });
  const Corpus corpus(folder / "corpus");
  const auto& record = corpus.record("train", "image");
  ShardSequence images(corpus, record);
  EXPECT_EQ(rows_of(images, record, 1090, 10), pixels.substr(1090 * 60, 600));
  EXPECT_EQ(rows_of(images, record, 0, 2000), pixels);
  flip_bit(file, 8 * (record.shard(0).values_offset() + 65536));
  ShardSequence again(corpus, record);
  EXPECT_EQ(rows_of(again, record, 1000, 1), pixels.substr(60000, 60));
  EXPECT_THAT(refusal_by([&] { rows_of(again, record, 1092, 1); }),
              HasSubstr("page 1 of /values (64 KiB at byte"));
}

TEST(RecordPages, OtherSizesThanPowersOfTwoAreRefused) {
  TemporaryFolder folder;
  write_image_corpus(folder / "corpus", 10, 10);
  const CorpusManifest good = Corpus(folder / "corpus").manifest();
  for (const std::int32_t bytes : {0, -4096, 1, 2048, 4097, 12288, 2 << 20}) {
    CorpusManifest manifest = good;
    manifest.mutable_split(0)->mutable_record(1)->mutable_shard(0)->set_page_bytes(bytes);
    expect_error(ExitCode::kData, [&] { parse_corpus_manifest(manifest_json(manifest), "m"); },
                 {fmt::format("m: split[0].record[1].shard[0]: page_bytes is {}, not a power of "
                              "two from 4096 to 1048576",
                              bytes)});
  }
}

// A damaged page is refused however many of the others threads have checked.
TEST(RecordPages, ADamagedPageIsRefusedWhateverElseIsChecked) {
  TemporaryFolder folder;
  write_image_corpus(folder / "corpus", 1100, 1100);
  const Corpus corpus(folder / "corpus");
  const auto& record = corpus.record("train", "image");
  const CorpusManifest::Shard& shard = record.shard(0);
  const std::int64_t row_bytes = shard_format::row_bytes(record);
  const std::int64_t num_pages = (shard.values_bytes() + 4095) / 4096;
  EXPECT_EQ(num_pages, 17);
  for (std::int64_t page = 0; page < num_pages; ++page) {
    const std::int64_t bit = 8 * (shard.values_offset() + 4096 * page + 100);
    flip_bit(folder / ("corpus/" + shard.file()), bit);
    ShardSequence rows(corpus, record);
    const auto read_others = [&] {
      for (std::int64_t row = 0; row < record.rows(); ++row) {
        const std::int64_t first = row * row_bytes / 4096,
                           last = ((row + 1) * row_bytes - 1) / 4096;
        if (last < page || first > page) rows_of(rows, record, row, 1);
        const std::int64_t damaged = (4096 * page + 100) / row_bytes;
        EXPECT_THAT(refusal_by([&] { rows_of(rows, record, damaged, 1); }),
                    HasSubstr(fmt::format("page {} of /values", page)));
      }
    };
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) threads.emplace_back(read_others);
    for (std::thread& thread : threads) thread.join();
    flip_bit(folder / ("corpus/" + shard.file()), bit);
  }
}

// Reads of whole pages check those that are not checked yet, on both sides of a group of pages.
TEST(RecordPages, WholePagesAreCheckedWhereTheyWereNot) {
  TemporaryFolder folder;
  constexpr std::int64_t kRowBytes = 60, kRows = 4200 * 4096 / kRowBytes;
  const std::string pixels = write_image_corpus(folder / "corpus", kRows, kRows);
  const Corpus corpus(folder / "corpus");
  const auto& record = corpus.record("train", "image");
  const std::string file = folder / ("corpus/" + record.shard(0).file());
  // 1,024 rows are 15 pages. Some of them are checked before.
  for (const std::int64_t page : {0, 14, 4094, 4095, 4096}) {
    const std::int64_t bit = 8 * (record.shard(0).values_offset() + 4096 * page + 2000);
    const std::int64_t begin = page / 15 * 1024;
    flip_bit(file, bit);
    ShardSequence rows(corpus, record);
    for (std::int64_t row = begin; row < begin + 1024; row += 7) {
      if (row * kRowBytes / 4096 != page && ((row + 1) * kRowBytes - 1) / 4096 != page)
        rows_of(rows, record, row, 1);
    }
    EXPECT_THAT(refusal_by([&] { rows_of(rows, record, begin, 1024); }),
                HasSubstr(fmt::format("page {} of /values", page)));
    flip_bit(file, bit);
    EXPECT_EQ(rows_of(rows, record, begin, 1024),
              pixels.substr(static_cast<std::size_t>(begin * kRowBytes), 1024 * kRowBytes));
  }
  ShardSequence rows(corpus, record);
  for (int twice = 0; twice < 2; ++twice)
    EXPECT_TRUE(rows_of(rows, record, 0, record.rows()) == pixels);
}

// Verification names the page of every damage, and a row that is read is right or refused.
TEST(RecordPages, EveryBitOfImagesAndPointsIsCovered) {
  TemporaryFolder folder;
  write_image_corpus(folder / "corpus", 150, 100);
  const Corpus good(folder / "corpus");
  Tally tally("bits of images and points");
  for (const auto& record : good.manifest().split(0).record()) {
    ShardSequence reader(good, record);
    const std::string rows = rows_of(reader, record, 0, record.rows());
    const CorpusManifest::Shard& shard = record.shard(0);
    const std::string file = folder / ("corpus/" + shard.file());
    for (const std::int64_t bit : places_to_try(8 * shard.bytes())) {
      const std::int64_t in_values = bit / 8 - shard.values_offset();
      const bool is_value = in_values >= 0 && in_values < shard.values_bytes();
      // Bits outside values and table belong to HDF5: training does not read them.
      const std::int64_t in_table = bit / 8 - shard.page_crcs_offset();
      const bool is_read = is_value || (in_table >= 0 && in_table < shard.page_crcs_bytes());
      tally.attempt([&] {
        flip_bit(file, bit);
        const std::string place = is_value
                                      ? fmt::format("page {} of /values (4 KiB", in_values / 4096)
                                  : is_read ? "page table"
                                            : "";
        EXPECT_THAT(refusal_by([&] { verify_corpus(Corpus(folder / "corpus")); }),
                    testing::AllOf(HasSubstr(file), HasSubstr(is_read ? place : "hash")))
            << bit;
        std::string seen;
        const std::string refused = refusal_by([&] {
          ShardSequence damaged_reader(good, record);
          seen = rows_of(damaged_reader, record, 0, record.rows());
        });
        EXPECT_EQ(refused.empty(), !is_read) << bit;
        EXPECT_THAT(refused, HasSubstr(place)) << bit;
        EXPECT_TRUE(is_read || seen == rows) << bit;
        flip_bit(file, bit);
      });
    }
  }
  EXPECT_EQ(refusal_by([&] { verify_corpus(good); }), "");
}

}  // namespace
}  // namespace birkhoff
