#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <set>

#include "data/corpus/manifest.h"
#include "data/corpus/shard_format.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_targets.h"

namespace birkhoff {
namespace {

using configs::CorpusManifest;

bool lies_in(std::int64_t offset, std::int64_t bytes, const CorpusManifest::Shard& shard) {
  return offset >= 0 && bytes >= 0 && bytes <= shard.bytes() && offset <= shard.bytes() - bytes;
}

// The properties that readers rely on without another check. array: a stream of `total` elements,
// or a record of `total` rows.
template <typename Array>
void expect_sound(const Array& array, std::int64_t total) {
  std::int64_t left = total;
  for (const auto& shard : array.shard()) {
    left -= shard.elements();
    expect_promise(shard.elements() > 0 && left >= 0, "the shards' elements make the array's");
    expect_promise(lies_in(shard.values_offset(), shard.values_bytes(), shard) &&
                       lies_in(shard.documents_offset(), shard.documents_bytes(), shard) &&
                       lies_in(shard.page_crcs_offset(), shard.page_crcs_bytes(), shard),
                   "regions are inside their file");
    expect_promise(
        shard.values_bytes() / shard_format::dtype_bytes(array.dtype()) >= shard.elements(),
        "values have room for their elements");
    expect_promise(shard.documents_bytes() / 8 == shard.documents(), "documents have ends");
    const std::int64_t page = shard_format::page_bytes(shard);
    expect_promise(page >= shard_format::kMinPageBytes && page <= shard_format::kMaxPageBytes &&
                       shard.page_crcs_bytes() / 4 ==
                           shard_format::num_pages(shard.values_bytes(), page) +
                               shard_format::num_pages(shard.documents_bytes(), page),
                   "each page has its checksum");
  }
  expect_promise(left == 0, "the shards' elements make the array's");
}

void expect_sound(const CorpusManifest& manifest) {
  for (const auto& split : manifest.split()) {
    for (const auto& stream : split.stream()) expect_sound(stream, stream.elements());
    for (const auto& record : split.record()) {
      expect_sound(record, record.rows());
      const std::set<std::string> names(record.class_name().begin(), record.class_name().end());
      expect_promise(static_cast<int>(names.size()) == record.class_name_size() &&
                         std::all_of(names.begin(), names.end(), is_class_name),
                     "classes have different names that can be printed");
      expect_promise(names.empty() || (record.dtype() == CorpusManifest::u16 &&
                                       record.shape_size() == 0 && names.size() <= 65536),
                     "labels are u16");
    }
  }
}

}  // namespace

void fuzz_corpus_manifest(std::string_view input) {
  const std::string json(input);
  const std::string name = "corpus/manifest.json";
  is_accepted(ExitCode::kData, [&] { parse_corpus_manifest(json, name); });

  CorpusManifest manifest;
  if (!google::protobuf::util::JsonStringToMessage(json, &manifest).ok()) return;
  const std::string fitting = manifest_json(manifest);
  if (!is_accepted(ExitCode::kData, [&] { manifest = parse_corpus_manifest(fitting, name); })) {
    return;
  }
  expect_sound(manifest);
  expect_promise(manifest_json(manifest) == fitting, "the manifest read is the manifest written");
}

}  // namespace birkhoff
