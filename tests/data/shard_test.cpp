// Shards on disk: round trip, damage, verification.
#include <gtest/gtest.h>

#include <csignal>
#include <cstring>
#include <fstream>

#include "cluster/base/files/checksum.h"
#include "cluster/base/files/sandboxed_child.h"
#include "data/corpus/corpus.h"
#include "data/corpus/hdf5.h"
#include "data/corpus/manifest.h"
#include "data/corpus/shard_format.h"
#include "data/corpus/shard_reader.h"
#include "data/corpus/shard_writer.h"
#include "data/corpus/verify.h"
#include "tests/data/helpers.h"
#include "tests/data/prepare_helpers.h"
#include "tests/data/record_helpers.h"

namespace birkhoff {
namespace {

using configs::CorpusManifest;
using Numbers = std::vector<std::int64_t>;

// 300,000 bytes of four documents in one folder; every byte value occurs. Small shards: several per
// split.
PrepareOptions sample_corpus(const TemporaryFolder& folder) {
  for (unsigned file = 0; file < 4; ++file) {
    std::string text;
    for (unsigned i = 0; i < 75000; ++i) text += static_cast<char>(i * i / 7 + file);
    write_text(folder / fmt::format("in/{}", file), text);
  }
  PrepareOptions options = prepare_options(folder / "corpus", {folder / "in"});
  options.valid_fraction = 0;
  options.shard_tokens = 100000;
  prepare_corpus(options);
  return options;
}

void flip_byte(const std::string& path, std::int64_t offset) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(offset);
  const char byte = static_cast<char>(file.get());
  file.seekp(offset);
  file.put(static_cast<char>(byte ^ 0x10));
  ASSERT_TRUE(file.good());
}

TEST(Shards, HoldEveryTokenAndDocumentAcrossShards) {
  TemporaryFolder folder;
  sample_corpus(folder);
  const Corpus corpus(folder / "corpus");
  StreamReader reader(corpus, "train", "tokens");
  ASSERT_EQ(corpus.stream("train", "tokens").shard_size(), 4);
  ASSERT_EQ(reader.elements(), 300004);
  Numbers expected, ends;
  for (int file = 0; file < 4; ++file) {
    for (const char c : read_text(folder / fmt::format("in/{}", file)))
      expected.push_back(static_cast<unsigned char>(c));
    expected.push_back(256);
    ends.push_back(static_cast<std::int64_t>(expected.size()));
  }
  Numbers all(300004);
  reader.read(0, 300004, all.data());
  EXPECT_EQ(all, expected);
  Numbers some(50);
  reader.read(99980, 50, some.data());  // across a shard boundary
  EXPECT_EQ(some, Numbers(expected.begin() + 99980, expected.begin() + 100030));
  EXPECT_EQ(reader.document_ends(0, 300004), ends);
  EXPECT_EQ(reader.document_ends(75001, 150002), Numbers{150002});  // from < end <= to
  EXPECT_EQ(reader.document_ends(75000, 75001), Numbers{75001});
  EXPECT_EQ(reader.document_ends(75001, 150001), Numbers{});
  EXPECT_EQ(reader.document_ends(5, 5), Numbers{});
  verify_corpus(corpus);
  EXPECT_NE(describe_corpus(corpus).find("300004 u16 in 4 shards"), std::string::npos)
      << describe_corpus(corpus);
}

TEST(Shards, IdsTakeTheSmallestTypeThatHoldsThem) {
  using shard_format::id_dtype;
  EXPECT_EQ(id_dtype(1), CorpusManifest::u8);
  EXPECT_EQ(id_dtype(256), CorpusManifest::u8);
  EXPECT_EQ(id_dtype(257), CorpusManifest::u16);
  EXPECT_EQ(id_dtype(65536), CorpusManifest::u16);
  EXPECT_EQ(id_dtype(65537), CorpusManifest::i32);

  TemporaryFolder folder;
  std::string text;
  for (unsigned i = 0; i < 100000; ++i) text += static_cast<char>(i * i / 7);
  write_text(folder / "one", text);
  write_text(folder / "two", text);
  PrepareOptions options = prepare_options(folder / "bytes", {folder / "one"});
  options.valid_fraction = 0;
  prepare_corpus(options);
  const Corpus bytes(folder / "bytes");
  const auto& stream = bytes.stream("train", "tokens");
  EXPECT_EQ(stream.dtype(), CorpusManifest::u8);
  EXPECT_EQ(stream.shard(0).values_bytes(), 100000);  // as large as the text
  verify_corpus(bytes);
  EXPECT_EQ(text_of(bytes, "train"), text);
  // An end mark is one id more.
  options = prepare_options(folder / "marked", {folder / "one", folder / "two"});
  options.valid_fraction = 0;
  prepare_corpus(options);
  EXPECT_EQ(Corpus(folder / "marked").stream("train", "tokens").dtype(), CorpusManifest::u16);
}

// Earlier versions stored bytes as u16.
TEST(Shards, BytesStoredAsU16AreStillRead) {
  TemporaryFolder folder;
  sample_corpus(folder);
  make_directory(folder / "wide");
  const std::string text = read_text(folder / "in/0");
  StreamWriter writer(folder / "wide", "train", "tokens", CorpusManifest::u16, 30000);
  writer.append({reinterpret_cast<const unsigned char*>(text.data()),
                 reinterpret_cast<const unsigned char*>(text.data()) + text.size()});
  writer.end_document();
  CorpusManifest manifest = Corpus(folder / "corpus").manifest();
  manifest.mutable_tokenizer()->set_vocabulary(256);
  manifest.mutable_tokenizer()->clear_end_of_document();
  *manifest.mutable_split(0)->mutable_stream(0) = writer.finish();
  manifest.mutable_split(0)->mutable_counts()->set_documents(1);
  write_file_durably(folder / "wide/manifest.json", manifest_json(manifest));
  const Corpus wide(folder / "wide");
  verify_corpus(wide);
  EXPECT_EQ(text_of(wide, "train"), text);
}

TEST(Shards, ADocumentEndBelongsToTheShardOfItsLastToken) {
  TemporaryFolder folder;
  StreamWriter writer(folder / "", "train", "tokens", configs::CorpusManifest::i32, 4);
  writer.append({1, 2, 3, 100000});  // fills the first shard completely
  writer.end_document();
  writer.append({5, 6, 7, 8, 9});  // a document that begins and ends at shard boundaries
  writer.end_document();
  const auto stream = writer.finish();
  ASSERT_EQ(stream.shard_size(), 3);
  EXPECT_EQ(stream.shard(0).documents(), 1);
  EXPECT_EQ(stream.shard(1).documents(), 0);
  EXPECT_EQ(stream.shard(1).documents_offset(), 0);
  EXPECT_EQ(stream.shard(2).documents(), 1);
  EXPECT_EQ(stream.elements(), 9);
}

TEST(Shards, EqualContentGivesEqualBytes) {
  std::vector<std::uint32_t> values(5000, 7);
  std::vector<Hdf5DataSet> sets = {{"a", Hdf5Type::kU32, {5000}, values.data()},
                                   {"b", Hdf5Type::kU64, {0}, nullptr}};
  const std::string first = hdf5_image(sets);
  EXPECT_EQ(sets[1].offset, 0);
  EXPECT_EQ(std::memcmp(first.data() + sets[0].offset, values.data(), 20000), 0);
  EXPECT_EQ(hdf5_image(sets), first);
}

TEST(Shards, ADamagedPageIsNamedAtFirstTouchAndOthersStillRead) {
  TemporaryFolder folder;
  sample_corpus(folder);
  const Corpus corpus(folder / "corpus");
  const auto& shard = corpus.stream("train", "tokens").shard(1);
  flip_byte(folder / "corpus/train-tokens-00001.h5", shard.values_offset() + 2 * 4096 + 77);
  StreamReader reader(corpus, "train", "tokens");
  Numbers ids(100);
  reader.read(100000, 100, ids.data());
  for (int twice = 0; twice < 2; ++twice) {
    expect_error(ExitCode::kData, [&] { reader.read(100000 + 4096, 100, ids.data()); },
                 {"train-tokens-00001.h5", "page 2 of", "damaged"});
  }
  expect_error(ExitCode::kData, [&] { verify_corpus(corpus); },
               {"train-tokens-00001.h5", "page 2 of /tokens"});
}

// Streams written before manifests stated the size of pages have pages of 64 KiB.
TEST(Shards, PagesOf64KiBAreRead) {
  TemporaryFolder folder;
  sample_corpus(folder);
  const std::string path = folder / "corpus";
  Numbers expected(300004), all(300004), ends;
  {
    StreamReader reader(Corpus(path), "train", "tokens");
    reader.read(0, 300004, expected.data());
    ends = reader.document_ends(0, 300004);
  }
  edit_manifest(path, [&](CorpusManifest& manifest) {
    for (auto& shard : *manifest.mutable_split(0)->mutable_stream(0)->mutable_shard()) {
      ASSERT_EQ(shard.page_bytes(), 4096);
      std::string bytes = read_text(path + "/" + shard.file());
      std::vector<std::uint32_t> crcs;  // fewer, so they fit in place
      const auto add = [&](std::int64_t begin, std::int64_t size) {
        for (std::int64_t at = 0; at < size; at += 65536) {
          crcs.push_back(
              crc32c(bytes.data() + begin + at,
                     static_cast<std::size_t>(std::min<std::int64_t>(65536, size - at))));
        }
      };
      add(shard.values_offset(), shard.values_bytes());
      add(shard.documents_offset(), shard.documents_bytes());
      const std::size_t table_bytes = 4 * crcs.size();
      bytes.replace(static_cast<std::size_t>(shard.page_crcs_offset()), table_bytes,
                    reinterpret_cast<const char*>(crcs.data()), table_bytes);
      write_text(path + "/" + shard.file(), bytes);
      shard.clear_page_bytes();
      shard.set_page_crcs_bytes(static_cast<std::int64_t>(table_bytes));
      shard.set_page_crcs_crc(crc32c(crcs.data(), table_bytes));
    }
  });
  const Corpus corpus(path);
  StreamReader reader(corpus, "train", "tokens");
  reader.read(0, 300004, all.data());
  EXPECT_EQ(all, expected);
  EXPECT_EQ(reader.document_ends(0, 300004), ends);
  const auto& shard = corpus.stream("train", "tokens").shard(0);
  flip_byte(path + "/" + shard.file(), shard.values_offset() + 65536 + 4096);
  StreamReader again(corpus, "train", "tokens");
  again.read(0, 100, all.data());
  expect_error(ExitCode::kData, [&] { again.read(32768, 1, all.data()); },
               {"train-tokens-00000.h5", "page 1 of /tokens (64 KiB at byte"});
}

TEST(Shards, DamageOfDocumentEndsAndPageTableIsFound) {
  TemporaryFolder folder;
  sample_corpus(folder);
  const Corpus corpus(folder / "corpus");
  const auto& shard = corpus.stream("train", "tokens").shard(0);
  flip_byte(folder / "corpus/train-tokens-00000.h5", shard.documents_offset());
  expect_error(ExitCode::kData,
               [&] { StreamReader(corpus, "train", "tokens").document_ends(0, 100000); },
               {"train-tokens-00000.h5", "document_ends"});
  flip_byte(folder / "corpus/train-tokens-00000.h5", shard.documents_offset());
  EXPECT_EQ(StreamReader(corpus, "train", "tokens").document_ends(0, 100000).size(), 1u);
  flip_byte(folder / "corpus/train-tokens-00000.h5", shard.page_crcs_offset() + 1);
  Numbers ids(1);
  expect_error(ExitCode::kData,
               [&] { StreamReader(corpus, "train", "tokens").read(0, 1, ids.data()); },
               {"train-tokens-00000.h5", "page table"});
}

// The structure is checked even if the hashes are right (a forged corpus), in a child process that
// may crash.
TEST(Shards, DamagedHdf5MetadataNeverCrashesTheProcess) {
  TemporaryFolder folder;
  sample_corpus(folder);
  const Corpus corpus(folder / "corpus");
  const auto& shard = corpus.stream("train", "tokens").shard(0);
  const std::vector<Hdf5DataSet> sets = {
      {"tokens", Hdf5Type::kU16, {shard.elements()}, nullptr, shard.values_offset()},
      {"document_ends", Hdf5Type::kU64, {shard.documents()}, nullptr, shard.documents_offset()},
      {"page_crcs",
       Hdf5Type::kU32,
       {shard.page_crcs_bytes() / 4},
       nullptr,
       shard.page_crcs_offset()}};
  const std::string path = folder / "corpus/train-tokens-00000.h5";
  run_limited(path, [&] { check_hdf5(path, sets); });
  int refused = 0;
  for (std::int64_t offset = 0; offset < 400; offset += 9) {  // superblock and object headers
    flip_byte(path, offset);
    try {
      run_limited(path, [&] { check_hdf5(path, sets); });
    } catch (const Error& error) {
      ++refused;
      EXPECT_NE(std::string(error.what()).find("train-tokens-00000.h5"), std::string::npos)
          << error.what();
    }
    flip_byte(path, offset);
  }
  EXPECT_GT(refused, 20);
  auto other = sets;
  other[0].offset += 2;
  expect_error(ExitCode::kData, [&] { run_limited(path, [&] { check_hdf5(path, other); }); },
               {"/tokens", "offset"});
  other = sets;
  other[0].shape[0] -= 1;
  expect_error(ExitCode::kData, [&] { run_limited(path, [&] { check_hdf5(path, other); }); },
               {"/tokens", "size"});
  other = sets;
  other[0].type = Hdf5Type::kI32;
  expect_error(ExitCode::kData, [&] { run_limited(path, [&] { check_hdf5(path, other); }); },
               {"/tokens", "type"});
  other = sets;
  other[2].name = "crcs";
  expect_error(ExitCode::kData, [&] { run_limited(path, [&] { check_hdf5(path, other); }); },
               {"/crcs", "missing"});
}

TEST(LimitedChild, ReportsCrashesErrorsAndSuccess) {
  run_limited("f", [] {});
  expect_error(ExitCode::kCheckpoint,
               [] { run_limited("f", [] { fail(ExitCode::kCheckpoint, "from the child"); }); },
               {"from the child"});
  expect_error(ExitCode::kData, [] { run_limited("the-file", [] { std::raise(SIGABRT); }); },
               {"the-file: damaged", "signal 6"});
  // The machine, not the file.
  expect_error(ExitCode::kMemory, [] { run_limited("the-file", [] { std::raise(SIGKILL); }); },
               {"the-file: the process", "signal 9, twice", "free memory"});
  expect_error(ExitCode::kStorage, [] { run_limited("the-file", [] { std::raise(SIGTERM); }); },
               {"the-file: the process", "signal 15, twice"});
  expect_error(ExitCode::kData, [] { run_limited("the-file", [] { _exit(3); }); }, {"the-file"});
}

TEST(Corpus, MissingAndTruncatedFilesAreNamed) {
  TemporaryFolder folder;
  sample_corpus(folder);
  const std::string path = folder / "corpus/train-tokens-00002.h5";
  const std::string content = read_text(path);
  write_text(path, content.substr(0, content.size() - 1));
  expect_error(ExitCode::kData, [&] { Corpus corpus(folder / "corpus"); },
               {path, std::to_string(content.size())});
  write_text(path, content + "x");
  expect_error(ExitCode::kData, [&] { Corpus corpus(folder / "corpus"); }, {path});
  remove_file(path);
  expect_error(ExitCode::kData, [&] { Corpus corpus(folder / "corpus"); }, {path});
  write_text(path, content);
  const Corpus corpus(folder / "corpus");
  EXPECT_TRUE(corpus.has_split("train"));
  EXPECT_FALSE(corpus.has_split("valid"));
  expect_error(ExitCode::kData, [&] { corpus.split("valid"); }, {"'valid'", "train"});
  expect_error(ExitCode::kData, [&] { corpus.stream("train", "source"); }, {"'source'", "tokens"});
  expect_error(ExitCode::kData, [&] { Corpus nothing(folder / "nowhere"); },
               {"nowhere", "birkhoff prepare"});
  write_text(path, content.substr(0, content.size() - 1));  // truncated after start-up
  Numbers ids(1);
  expect_error(ExitCode::kData,
               [&] { StreamReader(corpus, "train", "tokens").read(200000, 1, ids.data()); },
               {path});
}

}  // namespace
}  // namespace birkhoff
