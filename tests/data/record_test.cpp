// Labels of documents: written and read in shards, found by document, damaged, forged.
#include <gtest/gtest.h>

#include <map>
#include <random>

#include "cluster/base/files/checksum.h"
#include "data/corpus/corpus.h"
#include "data/corpus/label_reader.h"
#include "data/corpus/manifest.h"
#include "data/corpus/record_writer.h"
#include "data/corpus/shard_format.h"
#include "data/corpus/shard_reader.h"
#include "data/corpus/shard_writer.h"
#include "data/corpus/verify.h"
#include "tests/cluster/base/corruption.h"
#include "tests/data/helpers.h"
#include "tests/data/prepare_helpers.h"
#include "tests/data/record_helpers.h"

namespace birkhoff {
namespace {

using configs::CorpusManifest;
using Labels = std::vector<std::int64_t>;

const std::vector<std::string> kClasses = {"no", "yes", "perhaps"};

struct Labelled {
  std::vector<std::int64_t> lengths;  // of the documents, in tokens
  Labels labels;
};

Labelled some_documents(int count, unsigned seed) {
  std::mt19937 random(seed);
  Labelled documents;
  for (int i = 0; i < count; ++i) {
    documents.lengths.push_back(1 + static_cast<std::int64_t>(random() % (i % 50 == 0 ? 40 : 3)));
    documents.labels.push_back(static_cast<std::int64_t>(random() % kClasses.size()));
  }
  return documents;
}

CorpusManifest::Record label_entry() {
  CorpusManifest::Record entry = entry_of("label", CorpusManifest::u16);
  entry.mutable_class_name()->Assign(kClasses.begin(), kClasses.end());
  return entry;
}

// A corpus whose documents have these lengths; tokens count up.
void write_corpus(const std::string& folder, const Labelled& documents, std::int64_t shard_tokens,
                  std::int64_t shard_rows) {
  make_directory(folder);
  StreamWriter stream(folder, "train", "tokens", CorpusManifest::u16, shard_tokens);
  RecordWriter record(folder, "train", label_entry(), shard_rows);
  std::int32_t token = 0;
  for (std::size_t i = 0; i < documents.labels.size(); ++i) {
    std::vector<std::int32_t> ids;
    for (std::int64_t t = 0; t < documents.lengths[i]; ++t) ids.push_back(token++ % 256);
    stream.append(ids);
    stream.end_document();
    const auto label = static_cast<std::uint16_t>(documents.labels[i]);
    record.append(&label, 1);
  }
  CorpusManifest manifest;
  manifest.set_format(shard_format::kManifestFormat);
  manifest.set_version(shard_format::kManifestVersion);
  manifest.mutable_tokenizer()->set_kind("bytes");
  manifest.mutable_tokenizer()->set_vocabulary(256);
  auto& split = *manifest.add_split();
  split.set_name("train");
  split.mutable_counts()->set_documents(static_cast<std::int64_t>(documents.labels.size()));
  *split.add_stream() = stream.finish();
  *split.add_record() = record.finish();
  write_file_durably(folder + "/" + kCorpusManifestName, manifest_json(manifest));
}

TEST(Records, LabelsComeBackAcrossShards) {
  TemporaryFolder folder;
  const Labelled documents = some_documents(100, 1);
  write_corpus(folder / "corpus", documents, 1000, 30);
  const Corpus corpus(folder / "corpus");
  const auto& record = corpus.record("train", "label");
  ASSERT_EQ(record.shard_size(), 4);
  EXPECT_EQ(record.shard(3).elements(), 10);
  EXPECT_EQ(record.shard(3).file(), "train-label-00003.h5");
  EXPECT_EQ(record.rows(), 100);
  LabelReader reader(corpus, "train", "label");
  EXPECT_EQ(reader.rows(), 100);
  EXPECT_EQ(labels_of(corpus, "train"), documents.labels);
  Labels some(35);
  reader.read(28, 35, some.data());  // the end of one shard, a whole one, and the start of a third
  EXPECT_EQ(some, Labels(documents.labels.begin() + 28, documents.labels.begin() + 63));
  reader.read(100, 0, nullptr);
  expect_error(ExitCode::kInternal, [&] { reader.read(99, 2, some.data()); }, {"outside"});
  verify_corpus(corpus);
}

// Row i of every dtype has elements that differ in each byte, and comes back wherever it lies.
TEST(Records, RowsOfEveryDtypeAndShapeComeBack) {
  TemporaryFolder folder;
  const Labelled documents = some_documents(100, 4);
  write_corpus(folder / "corpus", documents, 1000, 30);
  std::mt19937 random(6);
  std::map<std::string, std::vector<char>> written;
  for (const auto dtype :
       {CorpusManifest::u8, CorpusManifest::u16, CorpusManifest::i32, CorpusManifest::f32}) {
    for (const std::vector<std::int64_t>& shape : {std::vector<std::int64_t>{}, {7}, {3, 40, 40}}) {
      const std::string name =
          fmt::format("{}-{}", CorpusManifest::Dtype_Name(dtype), shape.size());
      const CorpusManifest::Record entry = entry_of(name, dtype, shape);
      const std::int64_t row_bytes = shard_format::row_bytes(entry);
      std::vector<char>& bytes = written[name];
      bytes.resize(static_cast<std::size_t>(100 * row_bytes));
      for (char& byte : bytes) byte = static_cast<char>(random());
      RecordWriter writer(folder / "corpus", "train", entry, /*shard_rows=*/30);
      writer.append(bytes.data(), 41);
      writer.append(bytes.data() + 41 * row_bytes, 1);
      writer.append(bytes.data() + 42 * row_bytes, 58);
      const CorpusManifest::Record record = writer.finish();
      edit_manifest(folder / "corpus", [&](CorpusManifest& manifest) {
        *manifest.mutable_split(0)->add_record() = record;
      });
    }
  }
  const Corpus corpus(folder / "corpus");
  verify_corpus(corpus);
  EXPECT_NE(describe_corpus(corpus).find("  record f32-3: 100 f32 x [3, 40, 40] in 4 shards\n"),
            std::string::npos)
      << describe_corpus(corpus);
  for (const auto& [name, bytes] : written) {
    const CorpusManifest::Record& record = corpus.record("train", name);
    ShardSequence reader(corpus, record);
    const std::int64_t row_bytes = shard_format::row_bytes(record);
    ASSERT_EQ(reader.elements(), 100) << name;
    ASSERT_EQ(100 * row_bytes, std::ssize(bytes)) << name;
    for (const auto& [from, count] : {std::pair(0, 100), {29, 2}, {58, 35}, {99, 1}}) {
      std::vector<char> rows(static_cast<std::size_t>(count * row_bytes));
      reader.read_bytes(from, count, rows.data());
      EXPECT_TRUE(std::equal(rows.begin(), rows.end(), bytes.begin() + from * row_bytes))
          << name << " rows from " << from;
    }
    expect_error(ExitCode::kData, [&] { LabelReader(corpus, "train", name); }, {"no labels"});
  }
}

// The bytes are right, but the manifest says another shape.
TEST(Records, AnotherShapeThanTheFilesIsRefused) {
  TemporaryFolder folder;
  write_corpus(folder / "corpus", some_documents(10, 4), 1000, 30);
  RecordWriter writer(folder / "corpus", "train", entry_of("image", CorpusManifest::f32, {2, 6}),
                      /*shard_rows=*/30);
  const std::vector<float> values(120, 1.5F);
  writer.append(values.data(), 10);
  CorpusManifest::Record record = writer.finish();
  record.set_shape(0, 3);
  record.set_shape(1, 4);
  edit_manifest(folder / "corpus", [&](CorpusManifest& manifest) {
    *manifest.mutable_split(0)->add_record() = record;
  });
  expect_error(ExitCode::kData, [&] { verify_corpus(Corpus(folder / "corpus")); },
               {"train-image-00000.h5", "/values", "different size"});
}

TEST(Records, AShardIsFullExactly) {
  TemporaryFolder folder;
  write_corpus(folder / "corpus", some_documents(60, 2), 1000, 30);
  EXPECT_EQ(Corpus(folder / "corpus").record("train", "label").shard_size(), 2);
}

TEST(Records, EqualLabelsGiveEqualBytes) {
  TemporaryFolder folder;
  write_corpus(folder / "a", some_documents(100, 3), 1000, 30);
  write_corpus(folder / "b", some_documents(100, 3), 1000, 30);
  EXPECT_EQ(content_of(folder / "a"), content_of(folder / "b"));
}

TEST(Records, AMissingOneIsNamedWithThoseThatExist) {
  TemporaryFolder folder;
  write_corpus(folder / "corpus", some_documents(5, 1), 1000, 30);
  const Corpus corpus(folder / "corpus");
  expect_error(ExitCode::kData, [&] { corpus.record("train", "labels"); },
               {folder / "corpus", "'labels'", "it has: label"});
  expect_error(ExitCode::kData, [&] { corpus.record("valid", "label"); }, {"'valid'", "train"});
  expect_error(ExitCode::kData, [&] { corpus.stream("train", "label"); }, {"it has: tokens"});
  expect_error(ExitCode::kData, [&] { LabelReader(corpus, "train", "colour"); }, {"'colour'"});
}

TEST(Records, NumbersWithoutClassesAreNoLabels) {
  TemporaryFolder folder;
  write_corpus(folder / "corpus", some_documents(5, 1), 1000, 30);
  edit_manifest(folder / "corpus", [](CorpusManifest& manifest) {
    manifest.mutable_split(0)->mutable_record(0)->clear_class_name();
  });
  const Corpus corpus(folder / "corpus");
  expect_error(ExitCode::kData, [&] { LabelReader(corpus, "train", "label"); },
               {folder / "corpus", "'label'", "no labels"});
  EXPECT_NE(describe_corpus(corpus).find("  record label: 5 u16 in 1 shard\n"), std::string::npos)
      << describe_corpus(corpus);
  verify_corpus(corpus);
}

// The bytes are as written, but the manifest has fewer classes.
TEST(Records, ALabelBeyondTheClassesIsRefused) {
  TemporaryFolder folder;
  Labelled documents = some_documents(100, 1);
  for (std::int64_t& label : documents.labels) label %= 2;
  documents.labels[41] = 2;
  write_corpus(folder / "corpus", documents, 1000, 30);
  edit_manifest(folder / "corpus", [](CorpusManifest& manifest) {
    manifest.mutable_split(0)->mutable_record(0)->mutable_class_name()->RemoveLast();
  });
  const Corpus corpus(folder / "corpus");
  LabelReader reader(corpus, "train", "label");
  Labels labels(100);
  reader.read(0, 41, labels.data());
  expect_error(ExitCode::kData, [&] { reader.read(0, 100, labels.data()); },
               {"train-label-00001.h5", "document 41 is 2", "2 classes"});
  expect_error(ExitCode::kData, [&] { verify_corpus(corpus); },
               {"train-label-00001.h5", "holds 2", "2 classes"});
}

TEST(Records, ADamagedPageIsNamedAtFirstTouchAndOthersStillRead) {
  TemporaryFolder folder;
  Labelled documents = some_documents(100000, 1);  // 48 full pages and a part of one
  write_corpus(folder / "corpus", documents, 1 << 20, 1 << 20);
  const Corpus corpus(folder / "corpus");
  const auto& shard = corpus.record("train", "label").shard(0);
  flip_bit(folder / "corpus/train-label-00000.h5", 8 * (shard.values_offset() + 2 * 4096 + 77));
  LabelReader reader(corpus, "train", "label");
  Labels labels(10);
  reader.read(4086, 10, labels.data());
  EXPECT_EQ(labels, Labels(documents.labels.begin() + 4086, documents.labels.begin() + 4096));
  for (int twice = 0; twice < 2; ++twice) {
    expect_error(ExitCode::kData, [&] { reader.read(4090, 10, labels.data()); },
                 {"train-label-00000.h5", "page 2 of /values", "damaged"});
  }
  reader.read(99990, 10, labels.data());
  expect_error(ExitCode::kData, [&] { verify_corpus(corpus); },
               {"train-label-00000.h5", "page 2 of /values"});
}

// The hash of the file is right, but its data sets are those of a stream.
TEST(Records, TheStructureIsChecked) {
  TemporaryFolder folder;
  write_corpus(folder / "corpus", some_documents(40, 1), 1000, 100);
  StreamWriter stream(folder / "corpus", "train", "label", CorpusManifest::u16, 1000);
  stream.append(std::vector<std::int32_t>(40, 1));
  CorpusManifest::Shard shard = stream.finish().shard(0);
  edit_manifest(folder / "corpus", [&](CorpusManifest& manifest) {
    *manifest.mutable_split(0)->mutable_record(0)->mutable_shard(0) = shard;
  });
  const Corpus corpus(folder / "corpus");
  EXPECT_EQ(labels_of(corpus, "train"), Labels(40, 1));
  expect_error(ExitCode::kData, [&] { verify_corpus(corpus); },
               {"train-label-00000.h5", "/values", "missing"});
}

TEST(Records, AreDescribedInALine) {
  TemporaryFolder folder;
  write_corpus(folder / "corpus", some_documents(100, 1), 1000, 30);
  const auto described = [&](const std::string& line) {
    const std::string text = describe_corpus(Corpus(folder / "corpus"));
    EXPECT_NE(text.find(line), std::string::npos) << text;
  };
  described("  label label: 3 classes (no, yes, perhaps), 100 u16 in 4 shards\n");
  const auto name = [&](const std::vector<std::string>& names) {
    edit_manifest(folder / "corpus", [&](CorpusManifest& manifest) {
      auto& record = *manifest.mutable_split(0)->mutable_record(0);
      record.mutable_class_name()->Assign(names.begin(), names.end());
    });
  };
  std::vector<std::string> many;
  for (int i = 0; i < 2000; ++i) many.push_back(std::to_string(i));
  name(many);
  described(
      "2000 classes (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, ...), 100");
  name({std::string(1000, 'n'), "b"});
  described("2 classes (...), 100");
}

TEST(Documents, AreFoundAcrossShards) {
  TemporaryFolder folder;
  for (const std::int64_t shard_tokens : {1, 2, 3, 7, 50, 100000}) {
    const std::string path = folder / fmt::format("corpus{}", shard_tokens);
    const Labelled documents = some_documents(80, 5);
    write_corpus(path, documents, shard_tokens, 1000);
    const Corpus corpus(path);
    StreamReader reader(corpus, "train", "tokens");
    ASSERT_EQ(reader.documents(), 80);
    std::int64_t begin = 0;
    for (std::size_t i = 0; i < 80; ++i) {
      const std::int64_t end = begin + documents.lengths[i];
      EXPECT_EQ(reader.document(static_cast<std::int64_t>(i)), std::make_pair(begin, end))
          << i << " in shards of " << shard_tokens;
      begin = end;
    }
    EXPECT_EQ(reader.document(3).second, reader.document(4).first);  // in any order
    expect_error(ExitCode::kInternal, [&] { reader.document(80); }, {"document"});
    expect_error(ExitCode::kInternal, [&] { reader.document(-1); }, {"document"});
  }
}

TEST(Documents, WithEndsOutOfOrderAreRefused) {
  TemporaryFolder folder;
  write_corpus(folder / "corpus", {{4, 4, 4}, {0, 1, 2}}, 1000, 1000);
  const std::string file = folder / "corpus/train-tokens-00000.h5";
  const auto shard = Corpus(folder / "corpus").stream("train", "tokens").shard(0);
  for (const std::uint64_t end :
       {std::uint64_t{3}, std::uint64_t{4}, std::uint64_t{13}, ~std::uint64_t{0}}) {
    // Document 1 ends there; the page table matches.
    std::string bytes = read_text(file);
    const auto ends = static_cast<std::size_t>(shard.documents_offset());
    bytes.replace(ends + 8, 8, reinterpret_cast<const char*>(&end), 8);
    const std::uint32_t crc = crc32c(bytes.data() + ends, 24);
    const auto table = static_cast<std::size_t>(shard.page_crcs_offset());
    bytes.replace(table + 4, 4, reinterpret_cast<const char*>(&crc), 4);
    write_text(file, bytes);
    edit_manifest(folder / "corpus", [&](CorpusManifest& manifest) {
      manifest.mutable_split(0)->mutable_stream(0)->mutable_shard(0)->set_page_crcs_crc(
          crc32c(bytes.data() + table, 8));
    });
    const Corpus corpus(folder / "corpus");
    StreamReader reader(corpus, "train", "tokens");
    EXPECT_EQ(reader.document(0), std::make_pair(std::int64_t{0}, std::int64_t{4}));
    expect_error(ExitCode::kData, [&] { reader.document(1); },
                 {file, "document 1", std::to_string(end)});
  }
}

}  // namespace
}  // namespace birkhoff
