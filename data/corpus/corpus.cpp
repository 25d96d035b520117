#include "data/corpus/corpus.h"

#include <span>

#include "cluster/base/error.h"
#include "cluster/base/files/checksum.h"
#include "cluster/base/files/file.h"
#include "data/corpus/manifest.h"
#include "data/corpus/shard_format.h"
#include "data/tokenizers/tokenizer_file.h"

namespace birkhoff {
namespace {

configs::CorpusManifest read_manifest(const std::filesystem::path& folder) {
  const std::string path = (folder / kCorpusManifestName).string();
  if (!path_exists(folder.string())) {
    std::error_code ignored;
    const std::string start = folder.is_relative()
                                  ? fmt::format(" (relative paths start at {})",
                                                std::filesystem::current_path(ignored).string())
                                  : "";
    fail(ExitCode::kData,
         "{}: no such folder{}; give the path of a corpus, or make one with birkhoff prepare --out "
         "{}",
         folder.string(), start, folder.string());
  }
  if (!path_exists(path)) {
    fail(ExitCode::kData,
         "{}: no {} in it, so it is not a (finished) corpus; make one with birkhoff prepare --out "
         "{}",
         folder.string(), kCorpusManifestName, folder.string());
  }
  return parse_corpus_manifest(read_file(path, shard_format::kManifestMaxBytes, ExitCode::kData),
                               path);
}

template <typename Entry>
const Entry* find(const google::protobuf::RepeatedPtrField<Entry>& entries, std::string_view name) {
  for (const Entry& entry : entries) {
    if (entry.name() == name) return &entry;
  }
  return nullptr;
}

template <typename Entry>
std::string names_of(const google::protobuf::RepeatedPtrField<Entry>& entries) {
  std::string names;
  for (const Entry& entry : entries) names += (names.empty() ? "" : ", ") + entry.name();
  return names.empty() ? "none" : names;
}

// The stream or record (`kind`) of that name.
template <typename Array>
const Array& found(const google::protobuf::RepeatedPtrField<Array>& arrays, std::string_view name,
                   const std::filesystem::path& folder, std::string_view split, const char* kind,
                   const char* cure = "") {
  const Array* array = find(arrays, name);
  if (array == nullptr) {
    fail(ExitCode::kData, "{}: split '{}' has no {} '{}'; it has: {}{}", folder.string(), split,
         kind, name, names_of(arrays), cure);
  }
  return *array;
}

}  // namespace

Corpus::Corpus(std::filesystem::path folder)
    : folder_(std::move(folder)), manifest_(read_manifest(folder_)) {
  const auto check_sizes = [this](const auto& arrays) {
    for (const auto& array : arrays) {
      for (const auto& shard : array.shard()) {
        const std::string path = (folder_ / shard.file()).string();
        const std::int64_t bytes = file_size(path, ExitCode::kData);
        if (bytes == shard.bytes()) continue;
        fail(ExitCode::kData,
             "{}: the file has {} bytes, the manifest says {}; prepare the corpus again or restore "
             "the file",
             path, bytes, shard.bytes());
      }
    }
  };
  for (const auto& entry : manifest_.split()) {
    check_sizes(entry.stream());
    check_sizes(entry.record());
    check_sizes(std::span(&entry.unknown_text(), entry.has_unknown_text() ? 1 : 0));
  }
  check_file_of(manifest_.tokenizer());
  for (const auto& entry : manifest_.split()) {
    for (const auto& stream : entry.stream())
      if (stream.has_tokenizer()) check_file_of(stream.tokenizer());
  }
}

void Corpus::check_file_of(const configs::CorpusManifest::Tokenizer& entry) const {
  const std::string path = file_of(entry).string();
  if (path.empty()) return;
  const std::string content = read_file(path, kTokenizerMaxBytes, ExitCode::kData);
  if (xxh3_hex(content.data(), content.size()) == entry.hash()) return;
  fail(ExitCode::kData,
       "{}: the file's hash is not the manifest's; prepare the corpus again or restore the file",
       path);
}

bool Corpus::has_split(std::string_view name) const {
  return find(manifest_.split(), name) != nullptr;
}

const configs::CorpusManifest::Split& Corpus::split(std::string_view name) const {
  const auto* found = find(manifest_.split(), name);
  if (found == nullptr) {
    fail(ExitCode::kData, "{}: the corpus has no split '{}'; it has: {}", folder_.string(), name,
         names_of(manifest_.split()));
  }
  return *found;
}

const configs::CorpusManifest::Stream& Corpus::stream(std::string_view split_name,
                                                      std::string_view name) const {
  return found(split(split_name).stream(), name, folder_, split_name, "stream");
}

const configs::CorpusManifest::Record& Corpus::record(std::string_view split_name,
                                                      std::string_view name) const {
  return found(split(split_name).record(), name, folder_, split_name, "record",
               "; birkhoff prepare makes records of labels (--label-column) and images (--images)");
}

const configs::CorpusManifest::Tokenizer& Corpus::tokenizer_entry(std::string_view stream) const {
  for (const auto& split : manifest_.split()) {
    const auto* entry = find(split.stream(), stream);
    if (entry != nullptr && entry->has_tokenizer()) return entry->tokenizer();
  }
  return manifest_.tokenizer();
}

std::filesystem::path Corpus::file_of(const configs::CorpusManifest::Tokenizer& entry) const {
  return entry.file().empty() ? std::filesystem::path() : folder_ / entry.file();
}

std::filesystem::path Corpus::tokenizer_file() const { return file_of(manifest_.tokenizer()); }

std::filesystem::path Corpus::tokenizer_file(std::string_view stream) const {
  return file_of(tokenizer_entry(stream));
}

void Corpus::stage(const StageOptions& options) {
  staged_ = std::make_shared<const StagedShards>(folder_, manifest_, options);
}

std::unique_ptr<Tokenizer> Corpus::tokenizer() const { return load(manifest_.tokenizer()); }

std::unique_ptr<Tokenizer> Corpus::tokenizer(std::string_view stream) const {
  return load(tokenizer_entry(stream));
}

std::unique_ptr<Tokenizer> Corpus::load(const configs::CorpusManifest::Tokenizer& entry) const {
  if (!has_tokenizer()) {
    fail(ExitCode::kData,
         "{}: the corpus has no tokenizer, because it holds records and no text; name a corpus of "
         "text",
         folder_.string());
  }
  check_file_of(entry);  // again: the file may have changed since
  return load_tokenizer(entry.kind(), file_of(entry), entry.vocabulary());
}

}  // namespace birkhoff
