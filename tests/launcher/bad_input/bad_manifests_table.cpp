// Corpora whose manifest.json is damaged. Rows with edit() remove its checksum, as in manifests of
// earlier versions, and keep the fingerprint. Rows with signed_edit() make both match, so that only
// the manifest's own checks can detect the damage.
#include <limits>
#include <nlohmann/json.hpp>

#include "configs/schema/corpus_manifest.pb.h"
#include "tests/launcher/bad_input/bad_input.h"
#include "tests/launcher/bad_input/damage.h"

namespace birkhoff {
namespace {

using configs::CorpusManifest;
using Json = nlohmann::ordered_json;

BadInput row(std::string name, std::vector<std::string> words, std::function<void()> spoil) {
  words.push_back("corpus/manifest.json");
  return {.name = "manifest " + name,
          .line = "inspect corpus",
          .code = ExitCode::kData,
          .words = std::move(words),
          .spoil = std::move(spoil)};
}

BadInput edit(std::string name, std::vector<std::string> words, std::function<void(Json&)> change) {
  return row(std::move(name), std::move(words), [change = std::move(change)] {
    edit_json("corpus/manifest.json", [&](Json& manifest) {
      manifest.erase("checksum");
      change(manifest);
    });
  });
}

BadInput signed_edit(std::string name, std::vector<std::string> words,
                     std::function<void(CorpusManifest&)> change) {
  return row(std::move(name), std::move(words),
             [change = std::move(change)] { edit_corpus("corpus", change); });
}

Json& first_shard(Json& manifest) { return manifest["split"][0]["stream"][0]["shard"][0]; }
CorpusManifest::Shard& first_shard(CorpusManifest& manifest) {
  return *manifest.mutable_split(0)->mutable_stream(0)->mutable_shard(0);
}
CorpusManifest::Stream& first_stream(CorpusManifest& manifest) {
  return *manifest.mutable_split(0)->mutable_stream(0);
}

std::vector<BadInput> as_text() {
  const std::string path = "corpus/manifest.json";
  return {
      // Without a manifest, inspect does not recognize the folder; train reports what is missing.
      {.name = "manifest missing",
       .line = "inspect corpus",
       .code = ExitCode::kUsage,
       .words = {"corpus", "manifest.json"},
       .spoil = [=] { remove_one(path); }},
      {.name = "manifest missing, seen by train",
       .line = "train good.txtpb --run new",
       .code = ExitCode::kData,
       .words = {"corpus", "manifest.json", "birkhoff prepare"},
       .spoil = [=] { remove_one(path); },
       .where = Where::kHereAndProcess},
      {.name = "manifest empty",
       .line = "train good.txtpb --run new",
       .code = ExitCode::kData,
       .words = {path},
       .spoil = [=] { truncate_to(path, 0); }},
      {.name = "manifest a folder",
       .line = "train good.txtpb --run new",
       .code = ExitCode::kData,
       .words = {path},
       .spoil =
           [=] {
             remove_one(path);
             std::filesystem::create_directory(path);
           }},
      row("an empty object", {"format is missing", "'birkhoff corpus'"},
          [=] { write_bytes(path, "{}\n"); }),
      row("an empty list", {"not a corpus manifest"}, [=] { write_bytes(path, "[]\n"); }),
      row("a sentence", {"not a corpus manifest"}, [=] { write_bytes(path, "A corpus.\n"); }),
      {.name = "manifest an empty object, seen by verify",
       .line = "verify corpus",
       .code = ExitCode::kData,
       .words = {path, "format is missing"},
       .spoil = [=] { write_bytes(path, "{}"); },
       .where = Where::kHereAndProcess},
      {.name = "manifest an empty object, seen by eval",
       .line = "eval run --corpus corpus",
       .code = ExitCode::kData,
       .words = {path, "format is missing"},
       .spoil = [=] { write_bytes(path, "{}"); }},
      {.name = "manifest an empty object, seen by prepare --like",
       .line = "prepare --out new --like corpus text",
       .code = ExitCode::kData,
       .words = {path, "format is missing"},
       .spoil = [=] { write_bytes(path, "{}"); }},
      row("truncated to half", {"not a corpus manifest"},
          [=] { truncate_to(path, static_cast<std::int64_t>(read_bytes(path).size() / 2)); }),
      row("of a million opened lists", {"not a corpus manifest"},
          [=] {
            write_bytes(
                path, "{\"format\": \"birkhoff corpus\", \"split\": " + std::string(1000000, '['));
          }),
      row("not UTF-8", {"corpus"}, [=] { replace_text(path, "\"train\"", "\"tr\xff\xfen\""); }),
      row("with a trailing comma", {"not a corpus manifest"}, [=] { append_bytes(path, ","); }),
      edit("with an unknown field", {"not a corpus manifest", "colour"},
           [](Json& m) { m["colour"] = 1; }),
      row("with other options than it was made with", {"not a corpus manifest", "checksum"},
          [=] { replace_text(path, ", valid 0.2,", ", valid 0.3,"); }),
  };
}

std::vector<BadInput> fields() {
  return {
      edit("of another version", {"version is 2", "reads 1"}, [](Json& m) { m["version"] = 2; }),
      edit("without a version", {"version is 0"}, [](Json& m) { m.erase("version"); }),
      edit("with a version in words", {"not a corpus manifest"},
           [](Json& m) { m["version"] = "one"; }),
      edit("without a format", {"format is missing"}, [](Json& m) { m.erase("format"); }),
      edit("of format birkhoff corpus v0", {"format is"},
           [](Json& m) { m["format"] = "birkhoff corpus v0"; }),
      as_process_too(
          edit("without a fingerprint", {"fingerprint"}, [](Json& m) { m.erase("fingerprint"); })),
      edit("with another fingerprint", {"fingerprint is '00000000000000000000000000000000'"},
           [](Json& m) { m["fingerprint"] = std::string(32, '0'); }),
      edit("without a tokenizer", {"tokenizer", "kind"}, [](Json& m) { m.erase("tokenizer"); }),
      edit("with an unknown tokenizer", {"tokenizer", "'bpe'"},
           [](Json& m) { m["tokenizer"]["kind"] = "bpe"; }),
      edit("with a negative vocabulary", {"tokenizer", "vocabulary is -1"},
           [](Json& m) { m["tokenizer"]["vocabulary"] = "-1"; }),
      edit("with no vocabulary", {"tokenizer", "vocabulary is 0"},
           [](Json& m) { m["tokenizer"].erase("vocabulary"); }),
      edit("with a vocabulary of 2^40", {"tokenizer", "vocabulary is 1099511627776"},
           [](Json& m) { m["tokenizer"]["vocabulary"] = "1099511627776"; }),
      edit("with a vocabulary beyond 64 bits", {"not a corpus manifest"},
           [](Json& m) { m["tokenizer"]["vocabulary"] = "99999999999999999999"; }),
      edit("with a vocabulary of 40.5", {"not a corpus manifest"},
           [](Json& m) { m["tokenizer"]["vocabulary"] = 40.5; }),
      edit("with an end mark above the vocabulary", {"end_of_document is 5000"},
           [](Json& m) { m["tokenizer"]["end_of_document"] = "5000"; }),
      edit("with a negative end mark", {"end_of_document is -2"},
           [](Json& m) { m["tokenizer"]["end_of_document"] = "-2"; }),
      edit("without a tokenizer file", {"tokenizer", "file ''"},
           [](Json& m) { m["tokenizer"].erase("file"); }),
      edit("with a tokenizer file elsewhere", {"tokenizer", "'../words/tokenizer.words'"},
           [](Json& m) { m["tokenizer"]["file"] = "../words/tokenizer.words"; }),
      edit("with a short hash", {"tokenizer", "hash"},
           [](Json& m) { m["tokenizer"]["hash"] = "abc"; }),
      signed_edit("of bytes with a vocabulary file", {"tokenizer", "bytes need none"},
                  [](CorpusManifest& m) { m.mutable_tokenizer()->set_kind("bytes"); }),
      edit("without splits", {"no split"}, [](Json& m) { m.erase("split"); }),
      edit("with splits as a word", {"not a corpus manifest"},
           [](Json& m) { m["split"] = "train"; }),
      edit("with one split's name twice", {"'train' is used twice"},
           [](Json& m) { m["split"][1]["name"] = "train"; }),
      edit("with an empty split's name", {"split[0]", "name ''"},
           [](Json& m) { m["split"][0]["name"] = ""; }),
      edit("with a split named as a path", {"split[0]", "'../train'"},
           [](Json& m) { m["split"][0]["name"] = "../train"; }),
      edit("without counts", {"split[0]", "counts are missing"},
           [](Json& m) { m["split"][0].erase("counts"); }),
      edit("with negative bytes of text", {"split[0]", "negative"},
           [](Json& m) { m["split"][0]["counts"]["bytes"] = "-1"; }),
      edit("with another number of documents", {"split[0]", "documents"},
           [](Json& m) { m["split"][0]["counts"]["documents"] = "7"; }),
      edit("without a dtype", {"stream[0]", "dtype is missing"},
           [](Json& m) { m["split"][0]["stream"][0].erase("dtype"); }),
      edit("with an unknown dtype", {"not a corpus manifest"},
           [](Json& m) { m["split"][0]["stream"][0]["dtype"] = "u128"; }),
      edit("with another dtype", {"values_bytes"},
           [](Json& m) { m["split"][0]["stream"][0]["dtype"] = "i32"; }),
      edit("with a zero in the shape", {"shape holds 0"},
           [](Json& m) { m["split"][0]["stream"][0]["shape"] = {"0"}; }),
      edit("with a shape beyond 64 bits", {"shape is too large"},
           [](Json& m) {
             m["split"][0]["stream"][0]["shape"] = {"4294967296", "4294967296"};
           }),
      signed_edit("with nine dimensions", {"9 dimensions"},
                  [](CorpusManifest& m) {
                    for (int i = 0; i < 9; ++i) first_stream(m).add_shape(1);
                  }),
      edit("with more elements than the shards", {"elements are declared"},
           [](Json& m) { m["split"][0]["stream"][0]["elements"] = "999999"; }),
      edit("without its last shard", {"elements are declared"},
           [](Json& m) {
             auto& shards = m["split"][0]["stream"][0]["shard"];
             shards.erase(shards.size() - 1);
           }),
      signed_edit("with a stream twice", {"'tokens' is used twice"},
                  [](CorpusManifest& m) {
                    const auto copy = first_stream(m);
                    *m.mutable_split(0)->add_stream() = copy;
                  }),
  };
}

std::vector<BadInput> shards() {
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
  return {
      edit("without a shard's file", {"shard[0]", "file ''"},
           [](Json& m) { first_shard(m).erase("file"); }),
      edit("with a shard outside the folder", {"shard[0]", "'/etc/passwd'"},
           [](Json& m) { first_shard(m)["file"] = "/etc/passwd"; }),
      edit("with a hidden shard", {"shard[0]", "'.hidden'"},
           [](Json& m) { first_shard(m)["file"] = ".hidden"; }),
      edit(
          "with one file for two shards", {"listed twice"},
          [](Json& m) { first_shard(m)["file"] = m["split"][0]["stream"][0]["shard"][1]["file"]; }),
      edit("with a hash in capitals", {"shard[0]", "hash"},
           [](Json& m) { first_shard(m)["hash"] = std::string(32, 'F'); }),
      edit("with a shard of negative bytes", {"shard[0]", "bytes is -5"},
           [](Json& m) { first_shard(m)["bytes"] = "-5"; }),
      {.name = "manifest with a shard of other bytes",
       .line = "inspect corpus",
       .code = ExitCode::kData,
       .words = {"corpus/train-tokens-00000.h5", "the manifest says"},
       .spoil =
           [] {
             edit_corpus("corpus", [](CorpusManifest& m) {
               first_shard(m).set_bytes(first_shard(m).bytes() + 1);
             });
           }},
      edit("with a shard of no elements", {"shard[0]", "elements is 0"},
           [](Json& m) { first_shard(m)["elements"] = "0"; }),
      edit("with more documents than elements", {"shard[0]", "documents is"},
           [](Json& m) { first_shard(m)["documents"] = "100000"; }),
      signed_edit("with elements that overflow", {"shard[0]", "values_bytes"},
                  [=](CorpusManifest& m) { first_shard(m).set_elements(kHuge); }),
      signed_edit("with values beyond the file", {"shard[0]", "values"},
                  [=](CorpusManifest& m) { first_shard(m).set_values_offset(1 << 30); }),
      signed_edit("with values before the file", {"shard[0]", "values"},
                  [=](CorpusManifest& m) { first_shard(m).set_values_offset(-8); }),
      signed_edit("with an offset that overflows", {"shard[0]", "values"},
                  [=](CorpusManifest& m) { first_shard(m).set_values_offset(kHuge); }),
      signed_edit("with values over the page table", {"shard[0]", "overlap"},
                  [](CorpusManifest& m) {
                    first_shard(m).set_page_crcs_offset(first_shard(m).values_offset());
                  }),
      signed_edit("with a page table too long", {"shard[0]", "page_crcs_bytes"},
                  [](CorpusManifest& m) { first_shard(m).set_page_crcs_bytes(4000); }),
      signed_edit("without the page table's checksum", {"shard[0]", "page_crcs_crc"},
                  [](CorpusManifest& m) { first_shard(m).clear_page_crcs_crc(); }),
      signed_edit("with negative documents", {"shard[0]", "documents is -1"},
                  [](CorpusManifest& m) { first_shard(m).set_documents(-1); }),
      {.name = "manifest with a page table elsewhere",
       .line = "verify corpus",
       .code = ExitCode::kData,
       .words = {"train-tokens-00000.h5"},
       .spoil =
           [] {
             edit_corpus("corpus", [](CorpusManifest& m) {
               auto& shard = first_shard(m);
               shard.set_page_crcs_offset(shard.page_crcs_offset() + 4);
               shard.set_bytes(shard.bytes() + 4);
             });
             append_bytes("corpus/train-tokens-00000.h5", "abcd");
             accept_shard("corpus", "train");
           }},
      {.name = "manifest with values elsewhere, seen by eval",
       .line = "eval run",
       .code = ExitCode::kData,
       .words = {"valid-tokens-00000.h5", "damaged"},
       .spoil =
           [] {
             edit_corpus("corpus", [](CorpusManifest& m) {
               auto& shard = *m.mutable_split(1)->mutable_stream(0)->mutable_shard(0);
               shard.set_values_offset(shard.values_offset() - 2);
             });
           }},
  };
}

}  // namespace

std::vector<BadInput> bad_manifests() {
  std::vector<BadInput> rows;
  for (auto table : {as_text, fields, shards}) {
    for (BadInput& bad : table()) rows.push_back(std::move(bad));
  }
  return rows;
}

}  // namespace birkhoff
