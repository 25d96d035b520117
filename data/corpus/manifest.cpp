#include "data/corpus/manifest.h"

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <stdexcept>
#include <utility>
#include <vector>

#include "cluster/base/error.h"
#include "cluster/base/files/checksum.h"
#include "cluster/base/text/utf8.h"
#include "configs/loader/checksummed_json.h"
#include "configs/loader/message_text.h"
#include "data/corpus/shard_format.h"

namespace birkhoff {
namespace {

using configs::CorpusManifest;
using shard_format::num_pages;

constexpr std::int64_t kMaxVocabulary = std::int64_t{1} << 30;

// Tracks the path of the field that is being checked, and names it in errors.
class Checker {
 public:
  explicit Checker(std::string name) : name_(std::move(name)) {}

  template <typename... Args>
  void check(bool good, fmt::format_string<Args...> format, Args&&... args) const {
    if (good) return;
    fail(ExitCode::kData, "{}: {}: {}; prepare the corpus again", name_,
         path_.empty() ? "manifest" : path_,
         printable(fmt::format(format, std::forward<Args>(args)...)));
  }

  template <typename Body>
  void inside(const std::string& step, Body body) {
    const std::string outer = path_;
    path_ += (outer.empty() ? "" : ".") + step;
    body();
    path_ = outer;
  }

  // Each shard must have its own file.
  void check_new_file(const std::string& file) {
    check(files_.insert(file).second, "file '{}' is listed twice", file);
  }

 private:
  std::string name_, path_;
  std::set<std::string> files_;
};

bool is_control(unsigned char c) { return c < 0x20 || c == 0x7f; }

bool is_hash(const std::string& text) {
  return text.size() == 32 && text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

// Whether the text is the name of a file in the corpus folder, not a path that leads out of it.
bool is_plain_name(const std::string& text) {
  return !text.empty() && text.size() <= 200 && text[0] != '.' &&
         text.find('/') == std::string::npos &&
         std::all_of(text.begin(), text.end(),
                     [](unsigned char c) { return c != ' ' && !is_control(c); });
}

// a * b for counts, or -1 on overflow.
std::int64_t product(std::int64_t a, std::int64_t b) {
  std::int64_t result = 0;
  return __builtin_mul_overflow(a, b, &result) ? -1 : result;
}

struct Region {
  const char* what;
  std::int64_t offset, bytes;
};

void check_regions(const CorpusManifest::Shard& shard, Checker& checker) {
  std::vector<Region> regions = {{"values", shard.values_offset(), shard.values_bytes()},
                                 {"documents", shard.documents_offset(), shard.documents_bytes()},
                                 {"page_crcs", shard.page_crcs_offset(), shard.page_crcs_bytes()}};
  for (const Region& region : regions) {
    checker.check(region.offset >= 0 && region.offset <= shard.bytes() - region.bytes,
                  "{} bytes of {} at {} do not fit in a file of {} bytes", region.bytes,
                  region.what, region.offset, shard.bytes());
  }
  std::sort(regions.begin(), regions.end(),
            [](const Region& a, const Region& b) { return a.offset < b.offset; });
  for (std::size_t i = 1; i < regions.size(); ++i) {
    checker.check(regions[i - 1].offset + regions[i - 1].bytes <= regions[i].offset ||
                      regions[i - 1].bytes == 0,
                  "{} and {} overlap", regions[i - 1].what, regions[i].what);
  }
}

// row_bytes: the size of an element (streams) or of a row (records).
void check_shard(const CorpusManifest::Shard& shard, std::int64_t row_bytes, bool has_documents,
                 Checker& checker) {
  checker.check(is_plain_name(shard.file()), "file '{}' is not a plain name", shard.file());
  checker.check_new_file(shard.file());
  checker.check(is_hash(shard.hash()), "hash is not 32 hexadecimal digits");
  checker.check(shard.bytes() > 0, "bytes is {}", shard.bytes());
  checker.check(shard.elements() > 0, "elements is {}", shard.elements());
  checker.check(shard.documents() >= 0 && shard.documents() <= shard.elements(),
                "documents is {} of {} elements", shard.documents(), shard.elements());
  checker.check(has_documents || shard.documents() == 0, "documents is {} in a record",
                shard.documents());
  checker.check(shard.values_bytes() >= 0 && shard.documents_bytes() >= 0,
                "values_bytes is {}, documents_bytes is {}", shard.values_bytes(),
                shard.documents_bytes());
  checker.check(shard.values_bytes() == product(shard.elements(), row_bytes),
                "values_bytes is {} for {} elements of {} bytes", shard.values_bytes(),
                shard.elements(), row_bytes);
  checker.check(shard.documents_bytes() == product(shard.documents(), 8),
                "documents_bytes is {} for {} documents", shard.documents_bytes(),
                shard.documents());
  checker.check(shard.values_bytes() <= shard.bytes() && shard.documents_bytes() <= shard.bytes(),
                "more bytes of values or documents than the {} of the file", shard.bytes());
  const std::int64_t page_bytes = shard_format::page_bytes(shard);
  checker.check(page_bytes >= shard_format::kMinPageBytes &&
                    page_bytes <= shard_format::kMaxPageBytes &&
                    (page_bytes & (page_bytes - 1)) == 0,
                "page_bytes is {}, not a power of two from {} to {}", page_bytes,
                shard_format::kMinPageBytes, shard_format::kMaxPageBytes);
  const std::int64_t pages =
      num_pages(shard.values_bytes(), page_bytes) + num_pages(shard.documents_bytes(), page_bytes);
  checker.check(shard.page_crcs_bytes() == 4 * pages, "page_crcs_bytes is {} for {} pages",
                shard.page_crcs_bytes(), pages);
  checker.check(shard.has_page_crcs_crc(), "page_crcs_crc is missing");
  check_regions(shard, checker);
}

template <typename Array>  // Stream or Record
void check_array(const Array& array, std::int64_t total, std::int64_t documents, bool has_documents,
                 Checker& checker) {
  checker.check(array.has_dtype(), "dtype is missing");
  checker.check(array.shape_size() <= 8, "shape has {} dimensions (at most 8)", array.shape_size());
  std::int64_t row_bytes = shard_format::dtype_bytes(array.dtype());
  for (const std::int64_t size : array.shape()) {
    checker.check(size > 0, "shape holds {}", size);
    row_bytes = product(row_bytes, size);
    checker.check(row_bytes > 0, "shape is too large");
  }
  std::int64_t elements = 0, ends = 0;
  for (int i = 0; i < array.shard_size(); ++i) {
    checker.inside(fmt::format("shard[{}]", i), [&] {
      check_shard(array.shard(i), row_bytes, has_documents, checker);
      checker.check(!__builtin_add_overflow(elements, array.shard(i).elements(), &elements),
                    "too many elements");
      ends += array.shard(i).documents();
    });
  }
  checker.check(elements == total, "{} elements are declared, its shards hold {}", total, elements);
  checker.check(!has_documents || ends == documents,
                "{} documents are declared, its shards hold {}", documents, ends);
}

// The line of a tokenizer in the text that the fingerprint is computed from.
std::string identity_of(const CorpusManifest::Tokenizer& tokenizer) {
  return fmt::format("tokenizer {} {} {} {}\n", tokenizer.kind(), tokenizer.vocabulary(),
                     tokenizer.has_end_of_document() ? tokenizer.end_of_document() : -1,
                     tokenizer.hash());
}

void check_tokenizer(const CorpusManifest::Tokenizer& tokenizer, Checker& checker) {
  const std::set<std::string> kinds = {"bytes", "chars", "words", "whitespace", "sentencepiece"};
  checker.check(kinds.count(tokenizer.kind()) > 0,
                "kind is '{}', not bytes, chars, words, whitespace or sentencepiece",
                tokenizer.kind());
  checker.check(tokenizer.vocabulary() > 0 && tokenizer.vocabulary() <= kMaxVocabulary,
                "vocabulary is {}", tokenizer.vocabulary());
  checker.check(
      !tokenizer.has_end_of_document() || (tokenizer.end_of_document() >= 0 &&
                                           tokenizer.end_of_document() < tokenizer.vocabulary()),
      "end_of_document is {}, not below the vocabulary of {}", tokenizer.end_of_document(),
      tokenizer.vocabulary());
  if (tokenizer.kind() == "bytes") {
    checker.check(tokenizer.file().empty(), "file is '{}', but bytes need none", tokenizer.file());
  } else {
    checker.check(is_plain_name(tokenizer.file()), "file '{}' is not a plain name",
                  tokenizer.file());
    checker.check_new_file(tokenizer.file());
    checker.check(is_hash(tokenizer.hash()), "hash is not 32 hexadecimal digits");
  }
}

// Token ids, and the text of unknown tokens, need the tokenizer that made them. A corpus without
// streams needs no tokenizer.
bool needs_tokenizer(const CorpusManifest& manifest) {
  return std::any_of(manifest.split().begin(), manifest.split().end(), [](const auto& split) {
    return split.stream_size() > 0 || split.has_unknown_text();
  });
}

void check_class_names(const CorpusManifest::Record& record, Checker& checker) {
  if (record.class_name_size() == 0) return;
  checker.check(record.dtype() == CorpusManifest::u16 && record.shape_size() == 0,
                "class_name is for labels: dtype u16, no shape");
  const std::string defect = class_names_defect(record.class_name());
  checker.check(defect.empty(), "{}", defect);
}

void check_split(const CorpusManifest::Split& split, Checker& checker) {
  checker.check(is_plain_name(split.name()), "name '{}' is not a plain name", split.name());
  const auto& counts = split.counts();
  checker.check(split.has_counts(), "counts are missing");
  checker.check(counts.documents() >= 0 && counts.sentences() >= 0 && counts.words() >= 0 &&
                    counts.characters() >= 0 && counts.bytes() >= 0 &&
                    counts.unknown_tokens() >= 0 && counts.unknown_bytes() >= 0 &&
                    counts.changed_bytes() >= 0 && counts.added_spaces() >= 0,
                "counts holds a negative number");
  std::set<std::string> names;
  for (int i = 0; i < split.stream_size(); ++i) {
    const auto& stream = split.stream(i);
    checker.inside(fmt::format("stream[{}]", i), [&] {
      checker.check(is_plain_name(stream.name()), "name '{}' is not a plain name", stream.name());
      checker.check(names.insert(stream.name()).second, "name '{}' is used twice", stream.name());
      check_array(stream, stream.elements(), stream.documents(), true, checker);
      checker.check(stream.documents() == counts.documents(),
                    "documents is {}, counts.documents of the split is {}", stream.documents(),
                    counts.documents());
    });
  }
  if (split.has_unknown_text()) {
    checker.inside("unknown_text", [&] {
      const auto& text = split.unknown_text();
      check_array(text, text.rows(), 0, false, checker);
      checker.check(text.dtype() == CorpusManifest::u8 && text.shape_size() == 0,
                    "must be u8, without a shape");
      checker.check(text.rows() > 0, "has no rows");
      checker.check(text.rows() - counts.unknown_tokens() == counts.unknown_bytes(),
                    "rows is {} for {} bytes of {} unknown tokens", text.rows(),
                    counts.unknown_bytes(), counts.unknown_tokens());
    });
  }
  for (int i = 0; i < split.record_size(); ++i) {
    const auto& record = split.record(i);
    checker.inside(fmt::format("record[{}]", i), [&] {
      checker.check(is_plain_name(record.name()), "name '{}' is not a plain name", record.name());
      checker.check(names.insert(record.name()).second, "name '{}' is used twice", record.name());
      check_array(record, record.rows(), 0, false, checker);
      check_class_names(record, checker);
      checker.check(record.rows() == counts.documents(),
                    "rows is {}, counts.documents of the split is {}", record.rows(),
                    counts.documents());
    });
  }
}

// A stream has the same tokenizer in all splits.
void check_stream_tokenizers(const CorpusManifest& manifest, Checker& checker) {
  std::map<std::string, const CorpusManifest::Stream*> first;
  for (const auto& split : manifest.split()) {
    for (const auto& stream : split.stream()) {
      const auto [found, is_new] = first.emplace(stream.name(), &stream);
      const CorpusManifest::Stream& other = *found->second;
      checker.check(stream.has_tokenizer() == other.has_tokenizer() &&
                        stream.tokenizer().file() == other.tokenizer().file() &&
                        identity_of(stream.tokenizer()) == identity_of(other.tokenizer()),
                    "stream '{}' has another tokenizer in split '{}' than in an earlier one",
                    stream.name(), split.name());
      if (is_new && stream.has_tokenizer()) {
        checker.inside(fmt::format("tokenizer of stream '{}'", stream.name()),
                       [&] { check_tokenizer(stream.tokenizer(), checker); });
      }
    }
  }
}

// A value of a label means the same in all splits.
void check_same_classes(const CorpusManifest& manifest, const Checker& checker) {
  std::map<std::string, const CorpusManifest::Record*> first;
  for (const auto& split : manifest.split()) {
    for (const auto& record : split.record()) {
      const auto& other = *first.emplace(record.name(), &record).first->second;
      checker.check(std::equal(record.class_name().begin(), record.class_name().end(),
                               other.class_name().begin(), other.class_name().end()),
                    "record '{}' has other class names in split '{}' than in an earlier one",
                    record.name(), split.name());
    }
  }
}

}  // namespace

bool is_class_name(std::string_view text) {
  if (text.empty() || find_invalid_utf8(text) != std::string_view::npos) return false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    // U+0080 to U+009F, which terminals obey, too, begin with 0xc2.
    const bool is_c1 = text[i] == '\xc2' && static_cast<unsigned char>(text[i + 1]) < 0xa0;
    if (is_c1 || is_control(static_cast<unsigned char>(text[i]))) return false;
  }
  return true;
}

std::string class_names_defect(const google::protobuf::RepeatedPtrField<std::string>& names) {
  if (names.size() > kMaxClasses)
    return fmt::format("class_name has {} entries (at most {})", names.size(), kMaxClasses);
  std::set<std::string_view> different;
  for (const std::string& name : names) {
    if (!is_class_name(name))
      return fmt::format("class_name {} is empty or not printable", quoted(name));
    if (!different.insert(name).second)
      return fmt::format("class_name {} is used twice", quoted(name));
  }
  return "";
}

configs::CorpusManifest parse_corpus_manifest(const std::string& json, const std::string& name) {
  CorpusManifest manifest;
  try {
    parse_checksummed_json(json, Checksum::kOptional, manifest);
  } catch (const std::invalid_argument& error) {
    fail(ExitCode::kData,
         "{}: not a corpus manifest ({}); prepare the corpus again or restore the file", name,
         printable(error.what()));
  }
  Checker checker(name);
  checker.check(manifest.has_format(), "format is missing; it must be '{}'",
                shard_format::kManifestFormat);
  checker.check(manifest.format() == shard_format::kManifestFormat, "format is '{}', not '{}'",
                manifest.format(), shard_format::kManifestFormat);
  checker.check(manifest.version() == shard_format::kManifestVersion,
                "version is {}; this program reads {}", manifest.version(),
                shard_format::kManifestVersion);
  if (manifest.has_tokenizer() || needs_tokenizer(manifest))
    checker.inside("tokenizer", [&] { check_tokenizer(manifest.tokenizer(), checker); });
  checker.check(manifest.split_size() > 0, "there is no split");
  std::set<std::string> names;
  for (int i = 0; i < manifest.split_size(); ++i) {
    checker.inside(fmt::format("split[{}]", i), [&] {
      check_split(manifest.split(i), checker);
      checker.check(names.insert(manifest.split(i).name()).second, "name '{}' is used twice",
                    manifest.split(i).name());
    });
  }
  check_stream_tokenizers(manifest, checker);
  check_same_classes(manifest, checker);
  const std::string fingerprint = manifest_fingerprint(manifest);
  checker.check(manifest.fingerprint() == fingerprint, "fingerprint is '{}', its content gives {}",
                manifest.fingerprint(), fingerprint);
  return manifest;
}

CorpusManifest new_manifest() {
  CorpusManifest manifest;
  manifest.set_format(shard_format::kManifestFormat);
  manifest.set_version(shard_format::kManifestVersion);
  return manifest;
}

namespace {

CorpusManifest::Record new_record(const char* name, CorpusManifest::Dtype dtype,
                                  std::initializer_list<std::int64_t> shape) {
  CorpusManifest::Record record;
  record.set_name(name);
  record.set_dtype(dtype);
  for (const std::int64_t size : shape) record.add_shape(size);
  return record;
}

}  // namespace

CorpusManifest::Record label_record(const std::vector<std::string>& class_names) {
  CorpusManifest::Record record = new_record("label", CorpusManifest::u16, {});
  for (const std::string& name : class_names) record.add_class_name(name);
  return record;
}

CorpusManifest::Record point_record(std::int64_t points, std::int64_t coordinates) {
  return new_record("points", CorpusManifest::f32, {points, coordinates});
}

CorpusManifest::Record image_record(std::int64_t rows, std::int64_t columns,
                                    std::int64_t channels) {
  return new_record("image", CorpusManifest::u8, {rows, columns, channels});
}

std::string shard_file_name(const std::string& split, const std::string& array,
                            std::int64_t number) {
  return fmt::format("{}-{}-{:05}.h5", split, array, number);
}

std::string manifest_json(configs::CorpusManifest manifest) {
  manifest.set_fingerprint(manifest_fingerprint(manifest));
  return checksummed_json(manifest);
}

std::string manifest_fingerprint(const configs::CorpusManifest& manifest) {
  std::string text;
  if (manifest.has_tokenizer()) text += identity_of(manifest.tokenizer());
  const auto list = [&text](const auto& shards) {
    for (const auto& shard : shards) text += fmt::format("{} {}\n", shard.file(), shard.hash());
  };
  for (const auto& split : manifest.split()) {
    const auto& counts = split.counts();
    text += fmt::format("split {} {} {} {} {} {}\n", split.name(), counts.documents(),
                        counts.sentences(), counts.words(), counts.characters(), counts.bytes());
    for (const auto& stream : split.stream()) {
      text += fmt::format("stream {}\n", stream.name());
      if (stream.has_tokenizer()) text += identity_of(stream.tokenizer());
      list(stream.shard());
    }
    for (const auto& record : split.record()) {
      text += fmt::format("record {}\n", record.name());
      for (const std::string& name : record.class_name()) text += fmt::format("class {}\n", name);
      list(record.shard());
    }
  }
  return xxh3_hex(text.data(), text.size());
}

}  // namespace birkhoff
