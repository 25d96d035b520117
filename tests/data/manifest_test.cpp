#include "data/corpus/manifest.h"

#include <gtest/gtest.h>

#include <limits>

#include "tests/data/helpers.h"

namespace birkhoff {
namespace {

using configs::CorpusManifest;

CorpusManifest good_manifest() {
  CorpusManifest manifest;
  manifest.set_format("birkhoff corpus");
  manifest.set_version(1);
  auto& tokenizer = *manifest.mutable_tokenizer();
  tokenizer.set_kind("chars");
  tokenizer.set_vocabulary(66);
  tokenizer.set_file("tokenizer.chars");
  tokenizer.set_hash(std::string(32, 'a'));
  tokenizer.set_end_of_document(65);
  auto& split = *manifest.add_split();
  split.set_name("train");
  split.mutable_counts()->set_documents(3);
  split.mutable_counts()->set_bytes(100000);
  auto& stream = *split.add_stream();
  stream.set_name("tokens");
  stream.set_dtype(CorpusManifest::u16);
  stream.set_elements(100003);
  stream.set_documents(3);
  for (int i = 0; i < 2; ++i) {
    auto& shard = *stream.add_shard();
    shard.set_file(fmt::format("train-tokens-{:05}.h5", i));
    shard.set_bytes(300000);
    shard.set_hash(std::string(32, i == 0 ? 'b' : 'c'));
    shard.set_elements(i == 0 ? 60000 : 40003);
    shard.set_documents(i == 0 ? 1 : 2);
    shard.set_values_offset(4096);
    shard.set_values_bytes(2 * shard.elements());
    shard.set_documents_offset(200000);
    shard.set_documents_bytes(8 * shard.documents());
    shard.set_page_crcs_offset(210000);
    shard.set_page_crcs_bytes(
        4 * (2 - i + 1 + i));  // 120000 bytes: 2 pages, 80006 bytes: 2 pages; ends: 1 page
    shard.set_page_crcs_crc(123);
  }
  return manifest;
}

TEST(Manifest, RoundTrips) {
  const std::string json = manifest_json(good_manifest());
  CorpusManifest again = parse_corpus_manifest(json, "m");
  EXPECT_EQ(again.fingerprint(), manifest_fingerprint(good_manifest()));
  EXPECT_EQ(again.fingerprint().size(), 32u);
  again.clear_fingerprint();
  EXPECT_EQ(again.SerializeAsString(), good_manifest().SerializeAsString());
}

TEST(Manifest, RecordsBesideStreams) {
  CorpusManifest manifest = good_manifest();
  auto& record = *manifest.mutable_split(0)->add_record();
  record.set_name("image");
  record.set_dtype(CorpusManifest::u8);
  for (const std::int64_t size : {28, 28, 1}) record.add_shape(size);
  record.set_rows(3);
  auto& shard = *record.add_shard();
  shard.set_file("train-image-00000.h5");
  shard.set_bytes(10000);
  shard.set_hash(std::string(32, 'd'));
  shard.set_elements(3);
  shard.set_values_offset(2048);
  shard.set_values_bytes(3 * 784);
  shard.set_page_crcs_offset(8000);
  shard.set_page_crcs_bytes(4);
  shard.set_page_crcs_crc(1);
  EXPECT_EQ(parse_corpus_manifest(manifest_json(manifest), "m").split(0).record(0).shape(1), 28);
}

// A record of labels for the three documents of the split.
CorpusManifest labelled_manifest() {
  CorpusManifest manifest = good_manifest();
  auto& record = *manifest.mutable_split(0)->add_record();
  record.set_name("label");
  record.set_dtype(CorpusManifest::u16);
  record.set_rows(3);
  record.add_class_name("negative");
  record.add_class_name("positive");
  auto& shard = *record.add_shard();
  shard.set_file("train-label-00000.h5");
  shard.set_bytes(10000);
  shard.set_hash(std::string(32, 'd'));
  shard.set_elements(3);
  shard.set_values_offset(2048);
  shard.set_values_bytes(6);
  shard.set_page_crcs_offset(8000);
  shard.set_page_crcs_bytes(4);
  shard.set_page_crcs_crc(1);
  return manifest;
}

TEST(Manifest, ClassNamesArePartOfTheFingerprint) {
  CorpusManifest manifest = labelled_manifest();
  const CorpusManifest read = parse_corpus_manifest(manifest_json(manifest), "m");
  auto& names = *manifest.mutable_split(0)->mutable_record(0)->mutable_class_name();
  EXPECT_EQ(read.split(0).record(0).class_name(1), "positive");
  EXPECT_EQ(manifest_fingerprint(manifest), read.fingerprint());
  names.SwapElements(0, 1);
  EXPECT_NE(manifest_fingerprint(manifest), read.fingerprint());
  names.SwapElements(0, 1);
  *names.Mutable(1) = "neutral";
  EXPECT_NE(manifest_fingerprint(manifest), read.fingerprint());
}

// These were computed before records had classes: corpora without labels keep their fingerprints.
TEST(Manifest, CorporaWithoutLabelsKeepTheirFingerprints) {
  EXPECT_EQ(manifest_fingerprint(good_manifest()), "441c9316483694d8011b47fd6e064832");
  CorpusManifest manifest = labelled_manifest();
  manifest.mutable_split(0)->mutable_record(0)->clear_class_name();
  EXPECT_EQ(manifest_fingerprint(manifest), "4d3237f51fbe276d4b7fd40960a16cb2");
}

struct Damage {
  const char* field;  // part of the message
  std::function<void(CorpusManifest&)> apply;
};

CorpusManifest::Tokenizer& tokenizer(CorpusManifest& m) { return *m.mutable_tokenizer(); }
CorpusManifest::Split& split(CorpusManifest& m) { return *m.mutable_split(0); }
CorpusManifest::Stream& stream(CorpusManifest& m) { return *split(m).mutable_stream(0); }
CorpusManifest::Shard& shard(CorpusManifest& m) { return *stream(m).mutable_shard(1); }

void expect_refused(CorpusManifest manifest, const Damage& damage) {
  damage.apply(manifest);
  expect_error(ExitCode::kData,
               [&] { parse_corpus_manifest(manifest_json(manifest), "corpus/manifest.json"); },
               {"corpus/manifest.json", damage.field});
}

const std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();

TEST(Manifest, EveryWrongFieldIsNamed) {
  const std::vector<Damage> damages = {
      {"format", [](auto& m) { m.set_format("other"); }},
      {"format", [](auto& m) { m.clear_format(); }},
      {"version", [](auto& m) { m.set_version(2); }},
      {"version", [](auto& m) { m.clear_version(); }},
      {"tokenizer: kind", [](auto& m) { tokenizer(m).set_kind("letters"); }},
      {"tokenizer: kind", [](auto& m) { m.clear_tokenizer(); }},
      {"tokenizer: vocabulary", [](auto& m) { tokenizer(m).set_vocabulary(0); }},
      {"tokenizer: vocabulary", [](auto& m) { tokenizer(m).set_vocabulary(-5); }},
      {"tokenizer: vocabulary", [](auto& m) { tokenizer(m).set_vocabulary(kHuge); }},
      {"tokenizer: end_of_document", [](auto& m) { tokenizer(m).set_end_of_document(66); }},
      {"tokenizer: end_of_document", [](auto& m) { tokenizer(m).set_end_of_document(-1); }},
      {"tokenizer: file", [](auto& m) { tokenizer(m).set_file("../tokenizer"); }},
      {"tokenizer: file", [](auto& m) { tokenizer(m).set_file(""); }},
      {"tokenizer: file", [](auto& m) { tokenizer(m).set_kind("bytes"); }},
      {"tokenizer: hash", [](auto& m) { tokenizer(m).set_hash("abc"); }},
      {"tokenizer: hash", [](auto& m) { tokenizer(m).set_hash(std::string(32, 'G')); }},
      {"no split", [](auto& m) { m.clear_split(); }},
      {"split[1]: name 'train' is used twice",
       [](auto& m) { m.add_split()->set_name("train"), m.mutable_split(1)->mutable_counts(); }},
      {"split[0]: name", [](auto& m) { split(m).set_name(""); }},
      {"split[0]: name", [](auto& m) { split(m).set_name("a/b"); }},
      {"split[0]: counts", [](auto& m) { split(m).clear_counts(); }},
      {"split[0]: counts", [](auto& m) { split(m).mutable_counts()->set_bytes(-1); }},
      {"split[0].stream[0]: documents",
       [](auto& m) { split(m).mutable_counts()->set_documents(4); }},
      {"split[0].stream[0]: name", [](auto& m) { stream(m).clear_name(); }},
      {"split[0].stream[1]: name 'tokens' is used twice",
       [](auto& m) { split(m).add_stream()->set_name("tokens"); }},
      {"split[0].stream[0]: dtype", [](auto& m) { stream(m).clear_dtype(); }},
      {"split[0].stream[0].shard[0]: values_bytes",
       [](auto& m) { stream(m).set_dtype(CorpusManifest::i32); }},
      {"split[0].stream[0].shard[0]: values_bytes", [](auto& m) { stream(m).add_shape(2); }},
      {"split[0].stream[0]: shape", [](auto& m) { stream(m).add_shape(0); }},
      {"split[0].stream[0]: shape",
       [](auto& m) { stream(m).add_shape(kHuge), stream(m).add_shape(kHuge); }},
      {"split[0].stream[0]: shape",
       [](auto& m) {
         for (int i = 0; i < 9; ++i) stream(m).add_shape(1);
       }},
      {"split[0].stream[0]: 100004 elements", [](auto& m) { stream(m).set_elements(100004); }},
      {"split[0].stream[0]: 4 documents",
       [](auto& m) { stream(m).set_documents(4), split(m).mutable_counts()->set_documents(4); }},
      {"split[0].stream[0]: 100003 elements",
       [](auto& m) { stream(m).mutable_shard()->RemoveLast(); }},
      {"shard[1]: file", [](auto& m) { shard(m).set_file("a/b.h5"); }},
      {"shard[1]: file", [](auto& m) { shard(m).set_file(".."); }},
      {"shard[1]: file", [](auto& m) { shard(m).clear_file(); }},
      {"shard[1]: file", [](auto& m) { shard(m).set_file("train-tokens-00000.h5"); }},
      {"shard[1]: file", [](auto& m) { shard(m).set_file("tokenizer.chars"); }},
      {"shard[1]: file", [](auto& m) { shard(m).set_file("a\nb"); }},
      {"shard[1]: hash", [](auto& m) { shard(m).clear_hash(); }},
      {"shard[1]: bytes", [](auto& m) { shard(m).set_bytes(0); }},
      {"shard[1]: bytes", [](auto& m) { shard(m).set_bytes(-1); }},
      {"shard[1]: more bytes of values", [](auto& m) { shard(m).set_bytes(50000); }},
      {"shard[1]: elements", [](auto& m) { shard(m).set_elements(0); }},
      {"shard[1]: elements", [](auto& m) { shard(m).set_elements(-40003); }},
      {"shard[1]: values_bytes", [](auto& m) { shard(m).set_elements(kHuge); }},
      {"shard[1]: documents is", [](auto& m) { shard(m).set_documents(-1); }},
      {"shard[1]: documents is", [](auto& m) { shard(m).set_documents(kHuge); }},
      {"shard[1]: values_bytes", [](auto& m) { shard(m).set_values_bytes(80004); }},
      {"shard[1]: values_bytes is -1",
       [](auto& m) { shard(m).set_elements(kHuge), shard(m).set_values_bytes(-1); }},
      {"documents_bytes is -1", [](auto& m) { shard(m).set_documents_bytes(-1); }},
      {"shard[0]: page_crcs_bytes",
       [](auto& m) {
         stream(m).set_dtype(CorpusManifest::u8);
         auto& first = *stream(m).mutable_shard(0);
         first.set_elements(kHuge), first.set_values_bytes(kHuge), first.set_bytes(kHuge);
       }},
      {"shard[1]: documents_bytes", [](auto& m) { shard(m).set_documents_bytes(24); }},
      {"shard[1]: page_crcs_bytes", [](auto& m) { shard(m).set_page_crcs_bytes(8); }},
      {"shard[1]: page_crcs_bytes", [](auto& m) { shard(m).set_page_crcs_bytes(kHuge); }},
      {"shard[1]: page_crcs_crc", [](auto& m) { shard(m).clear_page_crcs_crc(); }},
      {"shard[1]: 80006 bytes of values at -1", [](auto& m) { shard(m).set_values_offset(-1); }},
      {"shard[1]: 80006 bytes of values",
       [](auto& m) { shard(m).set_values_offset(300000 - 80005); }},
      {"shard[1]: 80006 bytes of values", [](auto& m) { shard(m).set_values_offset(kHuge); }},
      {"shard[1]: 16 bytes of documents",
       [](auto& m) { shard(m).set_documents_offset(kHuge - 8); }},
      {"shard[1]: 12 bytes of page_crcs", [](auto& m) { shard(m).set_page_crcs_offset(299990); }},
      {"overlap", [](auto& m) { shard(m).set_documents_offset(4096 + 80000); }},
      {"overlap", [](auto& m) { shard(m).set_page_crcs_offset(199990); }},
  };
  for (const Damage& damage : damages) expect_refused(good_manifest(), damage);
}

TEST(Manifest, EveryWrongFieldOfALabelIsNamed) {
  const auto label = [](CorpusManifest & m) -> auto& { return *split(m).mutable_record(0); };
  const auto file = [label](CorpusManifest & m) -> auto& { return *label(m).mutable_shard(0); };
  const std::vector<Damage> damages = {
      {"record[0]: class_name 'positive' is used twice",
       [=](auto& m) { label(m).set_class_name(0, "positive"); }},
      {"record[0]: class_name ''", [=](auto& m) { label(m).set_class_name(0, ""); }},
      {"record[0]: class_name 'a\\x0ab'", [=](auto& m) { label(m).set_class_name(0, "a\nb"); }},
      {"record[0]: class_name 'a\\x7f'", [=](auto& m) { label(m).set_class_name(0, "a\x7f"); }},
      {"record[0]: class_name has 65537 entries",
       [=](auto& m) {
         for (int i = 2; i < 65537; ++i) label(m).add_class_name(std::to_string(i));
       }},
      {"record[0]: class_name is for labels: dtype u16",
       [=](auto& m) {
         label(m).set_dtype(CorpusManifest::i32);
         file(m).set_values_bytes(12);
       }},
      {"record[0]: class_name is for labels: dtype u16, no shape",
       [=](auto& m) { label(m).add_shape(1); }},
      {"record[0]: rows is 4, counts.documents of the split is 3",
       [=](auto& m) {
         label(m).set_rows(4);
         file(m).set_elements(4);
         file(m).set_values_bytes(8);
       }},
      {"record[0]: name 'tokens' is used twice", [=](auto& m) { label(m).set_name("tokens"); }},
      {"record[0].shard[0]: documents is 1 in a record",
       [=](auto& m) { file(m).set_documents(1); }},
      {"record 'label' has other class names in split 'test'",
       [=](auto& m) {
         auto& test = *m.add_split();
         test.set_name("test");
         test.mutable_counts();
         test.add_record()->set_name("label");
         test.mutable_record(0)->set_dtype(CorpusManifest::u16);
         test.mutable_record(0)->add_class_name("positive");
       }},
  };
  for (const Damage& damage : damages) expect_refused(labelled_manifest(), damage);
}

TEST(Manifest, EveryWrongFieldOfAStreamsTokenizerIsNamed) {
  CorpusManifest manifest = good_manifest();
  auto& own = *stream(manifest).mutable_tokenizer();
  own = manifest.tokenizer();
  own.set_file("source_tokenizer.chars");
  EXPECT_EQ(
      parse_corpus_manifest(manifest_json(manifest), "m").split(0).stream(0).tokenizer().file(),
      "source_tokenizer.chars");
  const auto of_stream = [](CorpusManifest & m) -> auto& { return *stream(m).mutable_tokenizer(); };
  const auto add_split = [](CorpusManifest & m) -> auto& {
    auto& test = *m.add_split();
    test.set_name("test");
    test.mutable_counts();
    auto& added = *test.add_stream();
    added.set_name("tokens");
    added.set_dtype(CorpusManifest::u16);
    return added;
  };
  const std::vector<Damage> damages = {
      {"tokenizer of stream 'tokens': kind", [=](auto& m) { of_stream(m).set_kind("letters"); }},
      {"tokenizer of stream 'tokens': vocabulary",
       [=](auto& m) { of_stream(m).set_vocabulary(0); }},
      {"tokenizer of stream 'tokens': end_of_document",
       [=](auto& m) { of_stream(m).set_end_of_document(66); }},
      {"tokenizer of stream 'tokens': file '../x'",
       [=](auto& m) { of_stream(m).set_file("../x"); }},
      {"tokenizer of stream 'tokens': file 'tokenizer.chars' is listed twice",
       [=](auto& m) { of_stream(m).set_file("tokenizer.chars"); }},
      {"tokenizer of stream 'tokens': hash", [=](auto& m) { of_stream(m).clear_hash(); }},
      {"tokenizer: kind", [](auto& m) { m.clear_tokenizer(); }},
      {"stream 'tokens' has another tokenizer in split 'test'", [=](auto& m) { add_split(m); }},
      {"stream 'tokens' has another tokenizer in split 'test'",
       [=](auto& m) {
         auto& other = *add_split(m).mutable_tokenizer();
         other = of_stream(m);
         other.set_vocabulary(70);
       }},
  };
  for (const Damage& damage : damages) expect_refused(manifest, damage);
}

TEST(Manifest, WrongTextIsRefused) {
  // Without its checksum, which would reveal any change, as in manifests from before it existed.
  const std::string sealed = manifest_json(good_manifest());
  const std::string json = "{" + sealed.substr(sealed.find(",\n") + 1);
  parse_corpus_manifest(json, "the-manifest");
  const auto replaced = [&](const std::string& from, const std::string& to) {
    std::string text = json;
    const std::size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return text.replace(at, from.size(), to);
  };
  std::string deep;
  for (int i = 0; i < 100000; ++i) deep += '[';
  const std::vector<std::string> texts = {
      "",
      "{",
      "null",
      "[]",
      "\xff\xfe",
      json.substr(0, json.size() / 2),
      deep,
      "{\"split\": " + deep,
      replaced("\"version\": 1", "\"version\": 1, \"colour\": 3"),     // an unknown field
      replaced("\"version\": 1", "\"version\": \"one\""),              // a wrong type
      replaced("\"elements\": \"100003\"", "\"elements\": \"1e40\""),  // out of range
      replaced("\"elements\": \"100003\"", "\"elements\": 0.5"),
      replaced("\"dtype\": \"u16\"", "\"dtype\": \"u64\""),
      replaced("\"bytes\": \"100000\"", "\"bytes\": \"99999\""),  // fingerprint
      replaced(std::string(32, 'b'), std::string(32, 'e')),       // fingerprint
      sealed + "\n",
      "{\"checksum\":\"",
  };
  for (const std::string& text : texts) {
    expect_error(ExitCode::kData, [&] { parse_corpus_manifest(text, "the-manifest"); },
                 {"the-manifest", "prepare"});
  }
}

}  // namespace
}  // namespace birkhoff
