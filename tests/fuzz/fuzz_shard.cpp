#include <cmath>

#include "cluster/base/files/checksum.h"
#include "data/corpus/corpus.h"
#include "data/corpus/label_reader.h"
#include "data/corpus/manifest.h"
#include "data/corpus/shard_format.h"
#include "data/corpus/shard_reader.h"
#include "data/loader/token_windows.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_targets.h"

namespace birkhoff {
namespace {

using configs::CorpusManifest;
template <typename Number>
void append(std::string& bytes, Number number) {
  bytes.append(reinterpret_cast<const char*>(&number), sizeof number);
}

void append_page_crcs(const std::string& region, std::size_t page_bytes, std::string& table) {
  for (std::size_t at = 0; at < region.size(); at += page_bytes)
    append(table, crc32c(region.data() + at, std::min(page_bytes, region.size() - at)));
}

// Sets one number of the entry to an arbitrary value.
void forge(CorpusManifest::Shard& shard, ByteReader& reader) {
  const auto field = reader.take<std::uint8_t>();
  const auto value = reader.take<std::int64_t>();
  switch (field % 11) {
    case 0:
      return shard.set_bytes(value);
    case 1:
      return shard.set_elements(value);
    case 2:
      return shard.set_documents(value);
    case 3:
      return shard.set_values_offset(value);
    case 4:
      return shard.set_values_bytes(value);
    case 5:
      return shard.set_documents_offset(value);
    case 6:
      return shard.set_documents_bytes(value);
    case 7:
      return shard.set_page_crcs_offset(value);
    case 8:
      return shard.set_page_crcs_bytes(value);
    case 9:
      return shard.set_page_bytes(static_cast<std::int32_t>(value));
    default:
      return shard.set_page_crcs_crc(static_cast<std::uint32_t>(value));
  }
}

// Returns a file in the layout of a shard, without the surrounding HDF5, and fills in its entry.
// array: the stream or record. rows: 0, or the number of rows of a record's shard, which has no
// documents.
template <typename Array>
std::string make_shard(ByteReader& reader, const Array& array, std::int64_t rows,
                       CorpusManifest::Shard& shard) {
  constexpr std::int64_t kMaxElements = 40000;  // more than a page
  const std::int64_t width = shard_format::dtype_bytes(array.dtype());
  const std::int64_t elements = rows > 0 ? rows : 1 + std::abs(reader.take_size() % kMaxElements);
  const std::int64_t documents = rows > 0 ? 0 : std::abs(reader.take_size() % 64);
  std::string ends, values, table;
  for (std::int64_t i = 0; i < documents; ++i) append(ends, reader.take_size());
  for (std::int64_t i = 0; i < elements * (shard_format::row_bytes(array) / width); ++i) {
    const std::int64_t id = reader.take_size();
    values.append(reinterpret_cast<const char*>(&id), static_cast<std::size_t>(width));
  }
  const auto page_bytes = static_cast<std::size_t>(shard_format::page_bytes(shard));
  append_page_crcs(values, page_bytes, table);
  append_page_crcs(ends, page_bytes, table);
  shard.set_hash(std::string(32, '0'));  // the file's hash: checked only by `birkhoff verify`
  shard.set_elements(elements);
  shard.set_documents(documents);
  shard.set_values_offset(0);
  shard.set_values_bytes(static_cast<std::int64_t>(values.size()));
  shard.set_documents_offset(static_cast<std::int64_t>(values.size()));
  shard.set_documents_bytes(static_cast<std::int64_t>(ends.size()));
  shard.set_page_crcs_offset(static_cast<std::int64_t>(values.size() + ends.size()));
  shard.set_page_crcs_bytes(static_cast<std::int64_t>(table.size()));
  shard.set_page_crcs_crc(crc32c(table.data(), table.size()));
  const std::string file = values + ends + table;
  shard.set_bytes(static_cast<std::int64_t>(file.size()));
  if (reader.take<std::uint8_t>() % 2 == 1) forge(shard, reader);
  return file;
}

void read_stream(const Corpus& corpus, ByteReader& reader) {
  StreamReader stream(corpus, "train", "tokens");
  for (int i = 0; i < 8; ++i) {
    const std::int64_t from = std::abs(reader.take_size() % (stream.elements() + 1));
    const std::int64_t count = std::abs(reader.take_size() % (stream.elements() - from + 1));
    std::vector<std::int64_t> ids(static_cast<std::size_t>(count));
    stream.read(from, count, ids.data());
    for (const std::int64_t id : ids) {
      expect_promise(id >= 0 && id < corpus.vocabulary(), "ids are below the vocabulary");
    }
    stream.document_ends(from, from + count);
    if (stream.documents() == 0) continue;
    const auto [begin, end] = stream.document(from % stream.documents());
    expect_promise(0 <= begin && begin < end && end <= stream.elements(),
                   "a document is a part of the stream");
  }
}

void read_images(const Corpus& corpus, ByteReader& reader) {
  const CorpusManifest::Record& record = corpus.record("train", "image");
  ShardSequence images(corpus, record);
  expect_promise(images.elements() == record.rows(), "a record has its rows");
  const std::int64_t from = std::abs(reader.take_size() % (record.rows() + 1));
  std::string row(static_cast<std::size_t>(shard_format::row_bytes(record)), '\0');
  for (std::int64_t i = from; i < record.rows(); ++i) images.read_bytes(i, 1, row.data());
  std::string all(row.size() * static_cast<std::size_t>(record.rows() - from), '\0');
  images.read_bytes(from, record.rows() - from, all.data());
  expect_promise(all.empty() || all.ends_with(row), "a row is the same when read again");
}

void read_labels(const Corpus& corpus, ByteReader& reader) {
  LabelReader labels(corpus, "train", "label");
  const std::int64_t from = std::abs(reader.take_size() % (labels.rows() + 1));
  std::vector<std::int64_t> values(static_cast<std::size_t>(labels.rows() - from));
  labels.read(from, labels.rows() - from, values.data());
  const int num_classes = corpus.record("train", "label").class_name_size();
  for (const std::int64_t value : values) {
    expect_promise(value >= 0 && value < num_classes, "labels are below the number of classes");
  }
}

void read_windows(const Corpus& corpus, ByteReader& reader) {
  WindowOptions options;
  options.sequence_length = 1 + reader.take<std::uint8_t>();
  options.restart_at_documents = options.with_documents = true;
  const auto windows = evaluation_windows(corpus, options);
  const std::int64_t begin = std::abs(reader.take_size() % windows->num_samples());
  const Batch batch = read_samples(*windows, begin, std::min(begin + 4, windows->num_samples()));
  const auto* segments = batch.at(field::kSegments).const_data_ptr<std::int32_t>();
  const auto* positions = batch.at(field::kPositions).const_data_ptr<std::int64_t>();
  const auto* documents = batch.at(field::kDocuments).const_data_ptr<std::int64_t>();
  const auto* mask = batch.at(field::kMask).const_data_ptr<std::uint8_t>();
  const std::int64_t num_documents = corpus.split("train").counts().documents();
  for (std::int64_t i = 0; i < batch.size() * options.sequence_length; ++i) {
    expect_promise(mask[i] == 0 || (documents[i] >= 0 && documents[i] < num_documents),
                   "a target is in a document");
    expect_promise(segments[i] >= 0 && segments[i] < options.sequence_length && positions[i] >= 0 &&
                       positions[i] < options.sequence_length,
                   "segments and positions are inside the window");
  }
}

}  // namespace

void fuzz_shard(std::string_view input) {
  static const TemporaryFolder folder;
  ByteReader reader(input);
  CorpusManifest manifest;
  manifest.set_format(shard_format::kManifestFormat);
  manifest.set_version(shard_format::kManifestVersion);
  manifest.mutable_tokenizer()->set_kind("bytes");
  manifest.mutable_tokenizer()->set_vocabulary(1 + reader.take<std::uint16_t>());
  auto& split = *manifest.add_split();
  split.set_name("train");
  auto& stream = *split.add_stream();
  stream.set_name("tokens");
  stream.set_dtype(static_cast<CorpusManifest::Dtype>(reader.take<std::uint8_t>() % 4));
  const auto shape = reader.take<std::uint8_t>();
  const int num_shards = 1 + shape % 3;
  const bool has_labels = shape >= 128, has_images = shape % 128 >= 64;
  std::uint64_t elements = 0, documents = 0;  // sums of arbitrary numbers wrap
  for (int i = 0; i < num_shards; ++i) {
    auto& shard = *stream.add_shard();
    shard.set_file(fmt::format("{}.h5", i));
    if (shape % 64 < 32) shard.set_page_bytes(shard_format::kPageBytes);  // else those of before
    write_input(folder, shard.file(), make_shard(reader, stream, 0, shard));
    elements += static_cast<std::uint64_t>(shard.elements());
    documents += static_cast<std::uint64_t>(shard.documents());
  }
  stream.set_elements(static_cast<std::int64_t>(elements));
  stream.set_documents(static_cast<std::int64_t>(documents));
  split.mutable_counts()->set_documents(stream.documents());
  const bool can_have_records = stream.documents() > 0 && stream.documents() < 1000;
  if (has_labels && can_have_records) {
    auto& record = *split.add_record();
    record.set_name("label");
    record.set_dtype(CorpusManifest::u16);
    record.set_rows(stream.documents());
    for (int i = reader.take<std::uint8_t>(); i >= 0; --i) record.add_class_name(std::to_string(i));
    auto& shard = *record.add_shard();
    shard.set_file("label.h5");
    write_input(folder, shard.file(), make_shard(reader, record, record.rows(), shard));
  }
  if (has_images && can_have_records) {
    auto& record = *split.add_record();
    record.set_name("image");
    const auto kind = reader.take<std::uint8_t>();
    record.set_dtype(static_cast<CorpusManifest::Dtype>(kind % 4));
    record.add_shape(1 + reader.take<std::uint8_t>() % 64);
    record.add_shape(1 + reader.take<std::uint8_t>() % 16);
    record.set_rows(stream.documents());
    auto& shard = *record.add_shard();
    shard.set_file("image.h5");
    if (kind < 128) shard.set_page_bytes(shard_format::kPageBytes);
    write_input(folder, shard.file(), make_shard(reader, record, record.rows(), shard));
  }
  write_input(folder, kCorpusManifestName, manifest_json(manifest));
  is_accepted(ExitCode::kData, [&] {
    const Corpus corpus(folder.path());
    read_stream(corpus, reader);
    read_windows(corpus, reader);
    for (const auto& record : split.record()) {
      if (record.name() == "label") read_labels(corpus, reader);
      if (record.name() == "image") read_images(corpus, reader);
    }
  });
}

}  // namespace birkhoff
