#include "data/corpus/verify.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "cluster/base/error.h"
#include "cluster/base/files/checksum.h"
#include "cluster/base/files/file.h"
#include "cluster/base/files/sandboxed_child.h"
#include "cluster/base/text/plural.h"
#include "configs/loader/message_text.h"
#include "data/corpus/hdf5.h"
#include "data/corpus/shard_file.h"
#include "data/corpus/shard_format.h"

namespace birkhoff {
namespace {

using configs::CorpusManifest;

// The exclusive upper bound of a stream's or record's values.
struct Limit {
  std::int64_t value;
  std::string name;
};

// Verifies the shards of one stream or record, in order.
class ArrayVerifier {
 public:
  // values: the name of the data set of the values.
  ArrayVerifier(CorpusManifest::Dtype dtype, const char* values, std::optional<Limit> limit)
      : dtype_(dtype), values_(values), limit_(std::move(limit)) {}

  void verify(const std::string& path, const CorpusManifest::Shard& shard) {
    const File file = File::open_for_read(path, ExitCode::kData);
    const std::vector<std::uint32_t> crcs = read_page_crcs(file, shard);
    const std::int64_t page_bytes = shard_format::page_bytes(shard);
    auto crc = crcs.begin();
    for_each_page(file, page_bytes, shard.values_offset(), shard.values_bytes(), crc, values_,
                  [&](const std::vector<char>& page) { check_values(path, page); });
    const std::int64_t end_of_shard = end_ + shard.elements();
    for_each_page(file, page_bytes, shard.documents_offset(), shard.documents_bytes(), crc,
                  shard_format::kDocumentEnds,
                  [&](const std::vector<char>& page) { check_ends(path, page, end_of_shard); });
    end_ = end_of_shard;
    check_hash(file, shard);  // last, so that an error names the page that differs
  }

  // Call after the last shard of a stream.
  void check_last_document(const std::string& what) const {
    if (end_ > 0 && last_document_end_ != end_) {
      fail(ExitCode::kData,
           "{}: the last document ends at {}, the tokens at {}; prepare the corpus again", what,
           last_document_end_, end_);
    }
  }

 private:
  static void check_hash(const File& file, const CorpusManifest::Shard& shard) {
    const std::string hash = xxh3_hex(file);
    if (hash != shard.hash()) {
      fail(ExitCode::kData,
           "{}: the file's hash is {}, the manifest says {}; prepare the corpus again or restore "
           "the file",
           file.path(), hash, shard.hash());
    }
  }

  static std::vector<std::uint32_t> read_page_crcs(const File& file,
                                                   const CorpusManifest::Shard& shard) {
    std::vector<std::uint32_t> crcs(static_cast<std::size_t>(shard.page_crcs_bytes() / 4));
    file.pread_exact(crcs.data(), crcs.size() * 4, shard.page_crcs_offset());
    if (crc32c(crcs.data(), crcs.size() * 4) != shard.page_crcs_crc()) {
      fail(ExitCode::kData,
           "{}: the page table at byte {} differs from its checksum; prepare the corpus again or "
           "restore the file",
           file.path(), shard.page_crcs_offset());
    }
    return crcs;
  }

  template <typename Visit>
  static void for_each_page(const File& file, std::int64_t page_bytes, std::int64_t offset,
                            std::int64_t bytes, std::vector<std::uint32_t>::const_iterator& crc,
                            const char* what, Visit visit) {
    std::vector<char> page;
    for (std::int64_t at = 0; at < bytes; at += page_bytes) {
      page.resize(static_cast<std::size_t>(std::min(page_bytes, bytes - at)));
      file.pread_exact(page.data(), page.size(), offset + at);
      if (crc32c(page.data(), page.size()) != *crc++) {
        fail(ExitCode::kData,
             "{}: page {} of /{} ({} KiB at byte {}) differs from its checksum; prepare the corpus "
             "again or restore the file",
             file.path(), at / page_bytes, what, page_bytes >> 10, offset + at);
      }
      visit(page);
    }
  }

  template <typename Value>
  void check_values_as(const std::string& path, const std::vector<char>& page) const {
    const auto* values = reinterpret_cast<const Value*>(page.data());
    const auto* end = values + page.size() / sizeof(Value);
    const auto* bad = std::find_if(values, end, [this](Value value) {
      return value < Value{0} || static_cast<std::int64_t>(value) >= limit_->value;
    });
    if (bad == end) return;
    fail(ExitCode::kData, "{}: holds {}, not below {}; prepare the corpus again", path, *bad,
         limit_->name);
  }

  void check_values(const std::string& path, const std::vector<char>& page) const {
    if (!limit_) return;
    switch (dtype_) {
      case CorpusManifest::u8:
        return check_values_as<std::uint8_t>(path, page);
      case CorpusManifest::u16:
        return check_values_as<std::uint16_t>(path, page);
      case CorpusManifest::i32:
        return check_values_as<std::int32_t>(path, page);
      case CorpusManifest::f32:
        return;
    }
  }

  void check_ends(const std::string& path, const std::vector<char>& page,
                  std::int64_t end_of_shard) {
    for (std::size_t at = 0; at < page.size(); at += 8) {
      std::uint64_t end = 0;
      std::memcpy(&end, page.data() + at, 8);
      const bool good = end > static_cast<std::uint64_t>(std::max(end_, last_document_end_)) &&
                        end <= static_cast<std::uint64_t>(end_of_shard);
      if (!good) {
        fail(ExitCode::kData,
             "{}: document end {} is not between {} and {}; prepare the corpus again", path, end,
             std::max(end_, last_document_end_), end_of_shard);
      }
      last_document_end_ = static_cast<std::int64_t>(end);
    }
  }

  CorpusManifest::Dtype dtype_;
  const char* values_;
  std::optional<Limit> limit_;
  std::int64_t end_ = 0;  // elements of the shards so far
  std::int64_t last_document_end_ = 0;
};

void check_structure(const std::string& path, const CorpusManifest::Stream& stream,
                     const CorpusManifest::Shard& shard) {
  if (stream.dtype() == CorpusManifest::f32 || stream.shape_size() > 0)
    fail(ExitCode::kData, "{}: only streams of ids (u8, u16, i32) can be verified", path);
  check_hdf5(path, shard_data_sets(shard, stream));
}

void check_structure(const std::string& path, const CorpusManifest::Record& record,
                     const CorpusManifest::Shard& shard) {
  check_hdf5(path, shard_data_sets(shard, record));
}

// A description of the text that a split's tokens do not represent; empty for bytes.
std::string describe_unknown(const CorpusManifest::Tokenizer& tokenizer,
                             const CorpusManifest::Split& split) {
  const auto& counts = split.counts();
  if (split.stream_size() == 0 || tokenizer.kind() == "bytes") return "";
  if (!counts.has_unknown_tokens()) {
    return "  unknown tokens: not counted, an earlier version prepared the corpus\n";
  }
  const auto tokens = static_cast<double>(split.stream(0).elements());
  std::string text =
      fmt::format("  unknown tokens: {} ({:.3g} %), {}\n", counts.unknown_tokens(),
                  100 * static_cast<double>(counts.unknown_tokens()) / std::max(1.0, tokens),
                  counted(counts.unknown_bytes(), "byte"));
  if (counts.changed_bytes() > 0) {
    text += fmt::format("  changed by the model: parts of {}, so bits per byte are withheld\n",
                        counted(counts.changed_bytes(), "byte"));
  }
  return text;
}

std::string describe_record(const CorpusManifest::Record& record) {
  const bool is_label = record.class_name_size() > 0;
  const std::string classes = is_label ? classes_text(record.class_name()) + ", " : "";
  const std::string shape =
      record.shape_size() == 0 ? "" : fmt::format(" x [{}]", fmt::join(record.shape(), ", "));
  const std::string resized = record.has_resized() ? ", resized: " + record.resized() : "";
  return fmt::format("  {} {}: {}{} {}{} in {}{}\n", is_label ? "label" : "record", record.name(),
                     classes, record.rows(), CorpusManifest::Dtype_Name(record.dtype()), shape,
                     counted(record.shard_size(), "shard"), printable(resized));
}

std::string describe_tokenizer(const CorpusManifest::Tokenizer& tokenizer) {
  return fmt::format("{}, {}{}", tokenizer.kind(), counted(tokenizer.vocabulary(), "id"),
                     tokenizer.has_end_of_document()
                         ? fmt::format(", {} ends a document", tokenizer.end_of_document())
                         : std::string());
}

// The sizes of a split; those of its text only if it has a stream.
std::string describe_counts(const CorpusManifest::Split& split) {
  const auto& counts = split.counts();
  if (split.stream_size() == 0) return counted(counts.documents(), "row");
  return fmt::format("{}, {}, {}, {}, {}", counted(counts.documents(), "document"),
                     counted(counts.sentences(), "sentence"), counted(counts.words(), "word"),
                     counted(counts.characters(), "character"), counted(counts.bytes(), "byte"));
}

}  // namespace

std::string classes_text(const google::protobuf::RepeatedPtrField<std::string>& names) {
  constexpr std::size_t kMaxBytes = 60;
  std::string list;
  for (const std::string& name : names) {
    const std::string more = (list.empty() ? "" : ", ") + name;
    if (list.size() + more.size() > kMaxBytes) {
      list += list.empty() ? "..." : ", ...";
      break;
    }
    list += more;
  }
  return fmt::format("{} ({})", counted(names.size(), "class", "classes"), list);
}

void verify_corpus(const Corpus& corpus) {
  if (corpus.has_tokenizer()) corpus.tokenizer();
  const auto path_of = [&](const CorpusManifest::Shard& shard) {
    return (corpus.folder() / shard.file()).string();
  };
  const auto verify_record = [&](const CorpusManifest::Record& record,
                                 const std::optional<Limit>& limit) {
    ArrayVerifier verifier(record.dtype(), shard_format::kRecordValues, limit);
    for (const auto& shard : record.shard()) verifier.verify(path_of(shard), shard);
  };
  for (const auto& split : corpus.manifest().split()) {
    for (const auto& stream : split.stream()) {
      corpus.tokenizer(stream.name());
      const std::int64_t vocabulary = corpus.tokenizer_entry(stream.name()).vocabulary();
      std::optional<Limit> limit;
      if (stream.shape_size() == 0)
        limit = {vocabulary, fmt::format("the vocabulary of {}", vocabulary)};
      ArrayVerifier verifier(stream.dtype(), shard_format::kValues, limit);
      for (const auto& shard : stream.shard()) verifier.verify(path_of(shard), shard);
      verifier.check_last_document(fmt::format(
          "{}: split '{}', stream '{}'", corpus.folder().string(), split.name(), stream.name()));
    }
    for (const auto& record : split.record()) {
      std::optional<Limit> limit;
      if (record.class_name_size() > 0)
        limit = {record.class_name_size(), fmt::format("the {} classes", record.class_name_size())};
      verify_record(record, limit);
    }
    verify_record(split.unknown_text(), {});
  }
  // The HDF5 parser opens no file of a corpus before every byte of all files has been checked.
  const auto check_structures = [&](const auto& array) {
    for (const auto& shard : array.shard())
      run_limited(path_of(shard), [&] { check_structure(path_of(shard), array, shard); });
  };
  for (const auto& split : corpus.manifest().split()) {
    for (const auto& stream : split.stream()) check_structures(stream);
    for (const auto& record : split.record()) check_structures(record);
    check_structures(split.unknown_text());
  }
}

std::string describe_corpus(const Corpus& corpus) {
  const auto& manifest = corpus.manifest();
  std::string text = fmt::format("corpus       {}\nfingerprint  {}\ntokenizer    {}\n",
                                 corpus.folder().string(), manifest.fingerprint(),
                                 corpus.has_tokenizer() ? describe_tokenizer(manifest.tokenizer())
                                                        : "none: records without text");
  for (const auto& stream : manifest.split(0).stream()) {
    if (stream.has_tokenizer())
      text += fmt::format("  of {:9} {}\n", stream.name(), describe_tokenizer(stream.tokenizer()));
  }
  for (const auto& split : manifest.split()) {
    text += fmt::format("split {:6} {}\n", split.name(), describe_counts(split));
    for (const auto& stream : split.stream()) {
      text += fmt::format("  stream {}: {} {} in {}", stream.name(), stream.elements(),
                          CorpusManifest::Dtype_Name(stream.dtype()),
                          counted(stream.shard_size(), "shard"));
      // The counts of a split are those of its first stream.
      text += &stream == &split.stream(0)
                  ? fmt::format(
                        " ({:.3f} tokens a byte)\n",
                        static_cast<double>(stream.elements()) /
                            static_cast<double>(std::max<std::int64_t>(1, split.counts().bytes())))
                  : "\n";
    }
    text += describe_unknown(manifest.tokenizer(), split);
    for (const auto& record : split.record()) text += describe_record(record);
  }
  return text;
}

}  // namespace birkhoff
