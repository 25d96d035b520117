// Text as it lies around: compressed files, and files that hold many documents.
#include "data/prepare/input/text_source.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>

#include "data/corpus/verify.h"
#include "data/prepare/input/split_overlap.h"
#include "data/text/text_file.h"
#include "tests/data/helpers.h"
#include "tests/data/prepare_helpers.h"
#include "tests/data/text/packed_bytes.h"
#include "tests/peak_memory.h"
#include "tests/sample_data.h"
#include "tests/sanitized.h"

namespace birkhoff {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using namespace std::string_literals;

using Packer = std::string (*)(std::string_view);
constexpr std::pair<const char*, Packer> kPackers[] = {{"gzip", &gzip_of}, {"zstd", &zstd_of}};

std::string unpacked(const std::string& path, std::size_t part_bytes = 1000) {
  TextFile file(File::open_for_read(path, ExitCode::kData), path);
  std::string text, part(part_bytes, '\0');
  while (const std::size_t got = file.read_some(part.data(), part.size())) {
    text.append(part, 0, got);
  }
  EXPECT_EQ(file.read_some(part.data(), part.size()), 0u) << "the end stays the end";
  return text;
}

// ---- Compressed files

TEST(TextFile, UnpacksWhatWasPacked) {
  const TemporaryFolder folder;
  const std::string long_text = sentences(9000, 1);
  for (const auto& [name, pack] : kPackers) {
    for (const std::string& text : {""s, "a"s, "\x1f"s, "(\xb5"s, long_text}) {
      write_text(folder / "plain", text);
      EXPECT_EQ(unpacked(folder / "plain"), text) << name;
      write_text(folder / "packed", pack(text));
      for (const std::size_t part : {1, 7, 100000}) {
        if (part == 1 && text.size() > 1000) continue;
        EXPECT_EQ(unpacked(folder / "packed", part), text) << name;
      }
      // Members or frames, one after another.
      write_text(folder / "packed", pack(text) + pack("") + pack("more"));
      EXPECT_EQ(unpacked(folder / "packed"), text + "more") << name;
    }
  }
}

TEST(TextFile, NamesFileAndReasonOfDamage) {
  const TemporaryFolder folder;
  const std::string text = sentences(300, 2);
  for (const auto& [name, pack] : kPackers) {
    const std::string packed = pack(text);
    const auto expect_damage = [&, kind = name](const std::string& bytes,
                                                const std::string& reason) {
      write_text(folder / "packed", bytes);
      expect_error(
          ExitCode::kData, [&] { unpacked(folder / "packed"); },
          {folder / "packed", fmt::format("damaged {} data: {}", kind, reason), "leave it out"});
    };
    for (const std::size_t left : {4ul, 12ul, packed.size() / 2, packed.size() - 1}) {
      expect_damage(packed.substr(0, left), "it ends early");
    }
    expect_damage(pack("one") + packed.substr(0, packed.size() - 3), "it ends early");
    expect_damage(packed + "and more", pack == &gzip_of ? "other bytes follow its end" : "");
    for (std::size_t i = 40; i < packed.size(); i += packed.size() / 9) {
      std::string damaged = packed;
      damaged[i] ^= 0x10;
      expect_damage(damaged, "");
    }
  }
}

TEST(TextFile, NamesThePipeForZstdDataWithALongWindow) {
  const TemporaryFolder folder;
  // A frame of one byte with a window of 2^27 bytes, then of 2^28.
  write_text(folder / "packed", "\x28\xb5\x2f\xfd\x00\x88\x09\x00\x00z"s);
  EXPECT_EQ(unpacked(folder / "packed"), "z");
  write_text(folder / "packed", "\x28\xb5\x2f\xfd\x00\x90\x09\x00\x00z"s);
  expect_error(ExitCode::kData, [&] { unpacked(folder / "packed"); },
               {"needs more than 128 MiB of memory to unpack",
                "zstdcat --long=31 " + folder / "packed" + " | birkhoff ... -"});
}

TEST(TextFile, MemoryDoesNotDependOnTheSizeOfTheFile) {
  if (kSanitized) GTEST_SKIP() << "memory of sanitizers";
  const TemporaryFolder folder;
  for (const auto& [name, pack] : kPackers) {
    {
      std::string text;
      for (int i = 0; i < 2000000; ++i) text += fmt::format("{{\"text\": \"line {}\"}}\n", i);
      write_text(folder / "packed", pack(text));
    }
    const std::int64_t before = peak_memory(/*reset=*/true);
    std::int64_t documents = 0;
    for_each_text({{folder / "packed"}}, "", {TextFormat::kJsonLines, "text"},
                  [&](const Document&) { ++documents; });
    const InputScan scan =
        for_each_text({{folder / "packed"}}, "", {}, [&](const Document& document) {
          DocumentReader reader(document);
          std::int64_t bytes = 0;
          for_each_chunk(reader, 0, document.bytes, 1 << 20,
                         [&](std::string_view part, std::int64_t) { bytes += std::ssize(part); });
          EXPECT_EQ(bytes, document.bytes);
        });
    EXPECT_EQ(documents, 2000000);
    EXPECT_GT(scan.bytes, 40 << 20);
    EXPECT_LT(peak_memory(/*reset=*/false) - before, 16 << 20) << name;
  }
}

// Of every piece of every document: the corpus of a compressed file is that of its text.
TEST(TextSource, ACompressedFileIsItsText) {
  const TemporaryFolder folder;
  const std::string text = sentences(800, 3);
  write_text(folder / "plain.txt", text);
  for (const std::string tokenizer : {"bytes", "chars"}) {
    const auto prepared = [&](const std::string& file) {
      remove_tree(folder / "corpus");
      PrepareOptions options = prepare_options(folder / "corpus", {folder / file}, tokenizer);
      options.test_fraction = 0.05;
      options.chunk_bytes = 999;
      EXPECT_THAT(prepare_corpus(options).notes, IsEmpty());
      EXPECT_TRUE(prepare_corpus(options).already_prepared);
      const Corpus corpus(folder / "corpus");
      verify_corpus(corpus);
      return std::vector{text_of(corpus, "train"), text_of(corpus, "valid"),
                         text_of(corpus, "test")};
    };
    const std::vector<std::string> expected = prepared("plain.txt");
    EXPECT_EQ(expected[0] + expected[1] + expected[2], text);
    for (const auto& [name, pack] : kPackers) {
      write_text(folder / "packed", pack(text));
      EXPECT_EQ(prepared("packed"), expected) << name << " " << tokenizer;
    }
  }
}

TEST(TextSource, RealTextInGzipIsItsText) {
  const auto packed = real_data("tinyshakespeare.txt.gz");
  if (!packed) GTEST_SKIP() << "BIRKHOFF_DATA holds no tinyshakespeare.txt.gz";
  const TemporaryFolder folder;
  write_real_data("tinyshakespeare.txt", folder / "plain");
  prepare_corpus(prepare_options(folder / "packed", {*packed}, "chars"));
  prepare_corpus(prepare_options(folder / "corpus", {folder / "plain"}, "chars"));
  for (const std::string split : {"train", "valid"}) {
    EXPECT_EQ(tokens_of(Corpus(folder / "packed"), split),
              tokens_of(Corpus(folder / "corpus"), split));
  }
}

// ---- Many documents in a file

std::vector<std::string> documents_of(const std::string& path, const TextFormat& format) {
  std::vector<std::string> texts;
  for_each_text({{path}}, "", format, [&](const Document& document) {
    EXPECT_EQ(document.bytes, std::ssize(*document.text));
    texts.emplace_back(*document.text);
  });
  return texts;
}

TEST(TextSource, OneFileOfManyDocumentsIsThoseDocuments) {
  const TemporaryFolder folder;
  std::vector<std::string> texts;
  std::string json, separated, lines;
  for (int i = 0; i < 60; ++i) {
    texts.push_back(fmt::format("{}: {}", i, sentences(1 + i % 3, i)));
    write_text(folder / fmt::format("plain/{:03}", i), texts.back());
    json += nlohmann::json{{"id", i}, {"text", texts.back()}, {"more", {{"text", "no"}}}}.dump() +
            (i % 7 == 0 ? "\r\n\n" : "\n");
    separated += texts.back() + "<|endoftext|>\n";
    std::string line = texts.back();
    std::erase(line, '\n');
    lines += line + "\n";
  }
  write_text(folder / "texts.jsonl", json);
  write_text(folder / "texts.sep", separated);
  write_text(folder / "texts.jsonl.zst", zstd_of(json));
  write_text(folder / "texts.sep.gz", gzip_of(separated));
  write_text(folder / "lines", lines);
  const auto prepared = [&](const std::string& path, const TextFormat& format) {
    remove_tree(folder / "corpus");
    PrepareOptions options = prepare_options(folder / "corpus", {folder / path}, "words");
    options.valid_fraction = 0;
    options.format = format;
    prepare_corpus(options);
    const Corpus corpus(folder / "corpus");
    verify_corpus(corpus);
    EXPECT_EQ(corpus.split("train").counts().documents(), 60) << path;
    return tokens_of(corpus, "train");
  };
  const std::vector<std::int32_t> expected = prepared("plain", {});
  const TextFormat jsonl{TextFormat::kJsonLines, "text"},
      separator{TextFormat::kSeparator, "<|endoftext|>"};
  EXPECT_EQ(prepared("texts.jsonl", jsonl), expected);
  EXPECT_EQ(prepared("texts.jsonl.zst", jsonl), expected);
  EXPECT_EQ(prepared("texts.sep", separator), expected);
  EXPECT_EQ(prepared("texts.sep.gz", separator), expected);
  const std::vector<std::string> of_lines = documents_of(folder / "lines", {TextFormat::kLines});
  ASSERT_EQ(of_lines.size(), texts.size());
  for (std::size_t i = 0; i < texts.size(); ++i) {
    std::erase(texts[i], '\n');
    EXPECT_EQ(of_lines[i], texts[i]);
  }
}

TEST(TextSource, SeparatorsStandAnywhereAndTakeTheirLineEnd) {
  const TemporaryFolder folder;
  const auto parts = [&](const std::string& text, const std::string& separator) {
    write_text(folder / "text", text);
    return documents_of(folder / "text", {TextFormat::kSeparator, separator});
  };
  EXPECT_THAT(parts("one\n<|>\ntwo\n<|>\n", "<|>"), ElementsAre("one\n", "two\n"));
  EXPECT_THAT(parts("one<|>two<|>three", "<|>"), ElementsAre("one", "two", "three"));
  EXPECT_THAT(parts("\xef\xbb\xbfone<|>\n\ntwo", "<|>"), ElementsAre("one", "\ntwo"));
  EXPECT_THAT(parts("one\r\n<|>\r\ntwo\r\n<|>\r\n", "<|>"), ElementsAre("one\r\n", "two\r\n"));
  EXPECT_THAT(parts("one<|>\r\r\ntwo<|>\r", "<|>"), ElementsAre("one", "\r\r\ntwo", "\r"));
  // A separator with line ends of its own takes no other.
  EXPECT_THAT(parts("one\n\ntwo\n\n\nthree", "\n\n"), ElementsAre("one", "two", "\nthree"));
  EXPECT_THAT(parts("one\n<|>\ntwo", "\n<|>"), ElementsAre("one", "\ntwo"));
  EXPECT_THAT(parts("one<|>\n\ntwo", "<|>\n"), ElementsAre("one", "\ntwo"));
  EXPECT_THAT(parts("none", "<|>"), ElementsAre("none"));
  EXPECT_THAT(parts("<|><|>one<|>", "<|>"), ElementsAre("one"));
  EXPECT_THAT(parts("<<|>|>", "<|>"), ElementsAre("<", "|>"));
  // A separator at each place around the limit of a read of 1 MiB.
  for (int shift = -12; shift <= 3; ++shift) {
    const std::string first(static_cast<std::size_t>((1 << 20) + shift), 'a');
    for (const std::string end : {"\n", "\r\n"}) {
      EXPECT_THAT(parts(first + "[separator]" + end + "b[separator]", "[separator]"),
                  ElementsAre(first, "b"));
    }
  }
  // A read that ends within the first bytes, as reads of gzip data do at the end of a member.
  write_text(folder / "text", gzip_of("\xef") + gzip_of("\xbb\xbfone<|>two"));
  EXPECT_THAT(documents_of(folder / "text", {TextFormat::kSeparator, "<|>"}),
              ElementsAre("one", "two"));
  write_text(folder / "text", gzip_of("BZh") + gzip_of("91AY&SY and more"));
  expect_error(ExitCode::kData,
               [&] {
                 documents_of(folder / "text", {TextFormat::kSeparator, "<|>"});
               },
               {folder / "text", "bzip2"});
  std::int64_t skipped = 0;
  write_text(folder / "text", "<|>a<|>\n<|>\n<|>");
  skipped =
      for_each_text({{folder / "text"}}, "", {TextFormat::kSeparator, "<|>"}, [](const Document&) {
      }).empty_texts;
  EXPECT_EQ(skipped, 3);
}

TEST(TextSource, NamesDocumentsByLineAndCountsEmptyOnes) {
  const TemporaryFolder folder;
  write_text(folder / "in/a.txt", "one\r\n\ntwo\n");
  std::vector<std::string> names;
  const InputScan scan =
      for_each_text({{folder / "in"}}, "", {TextFormat::kLines}, [&](const Document& document) {
        names.push_back(document.name + " " + std::string(*document.text));
        EXPECT_EQ(document.shown_path, folder / ("in/" + document.name));
      });
  EXPECT_THAT(names, ElementsAre("a.txt:1 one", "a.txt:3 two"));
  EXPECT_EQ(scan.documents, 2);
  EXPECT_EQ(scan.bytes, 6);
  EXPECT_EQ(scan.empty_texts, 1);
  PrepareOptions options = prepare_options(folder / "corpus", {folder / "in"});
  options.format = {TextFormat::kLines};
  options.valid_fraction = 0;
  EXPECT_THAT(prepare_corpus(options).notes, ElementsAre("skipped 1 document without text"));
  EXPECT_TRUE(Corpus(folder / "corpus").manifest().tokenizer().has_end_of_document());
  options.format = {TextFormat::kSeparator, "x"};
  expect_error(ExitCode::kUsage, [&] { prepare_corpus(options); }, {"other options", ", lines"});
}

// ---- JSON

TEST(JsonText, ReadsEscapesAndSurrogatePairs) {
  const auto text = [](const std::string& line) { return json_text(line, "text", "f:1"); };
  EXPECT_EQ(text(R"({"text": "a\"b\\c\/d\n\t\b\f\r"})"), "a\"b\\c/d\n\t\b\f\r");
  EXPECT_EQ(text(R"({"text": "\u00e9\u20AC\ud83d\ude00"})"),
            "\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80");
  EXPECT_EQ(text("{\"text\": \"\xc3\xa9\xf0\x9f\x98\x80\"}"), "\xc3\xa9\xf0\x9f\x98\x80");
  EXPECT_EQ(text(R"({"text": "a\u0000b"})"), "a\0b"s);
  EXPECT_EQ(text(R"({"id": [1, {"text": "no"}], "meta": {"text": 2}, "text": "yes", "z": null})"),
            "yes");
  EXPECT_EQ(text(R"({"text": ""})"), "");
  EXPECT_EQ(json_text(R"({"a.b": "x"})", "a.b", "f:1"), "x");
  EXPECT_EQ(text("{\"deep\": " + std::string(100000, '[') + std::string(100000, ']') +
                 ", \"text\": \"x\"}"),
            "x");
}

TEST(JsonText, NamesLineAndReason) {
  const TemporaryFolder folder;
  const auto expect_bad = [&](const std::string& line, const std::vector<std::string>& words) {
    write_text(folder / "f.jsonl", "{\"text\": \"good\"}\n\n" + line + "\n");
    std::vector<std::string> all = words;
    all.push_back(folder / "f.jsonl:3: ");
    const std::string what = expect_error(
        ExitCode::kData,
        [&] {
          documents_of(folder / "f.jsonl", {TextFormat::kJsonLines, "text"});
        },
        all);
    EXPECT_LT(what.size(), 400u) << what;
  };
  expect_bad("{\"text\": \"no end", {"not JSON", "missing closing quote"});
  expect_bad("{\"text\": \"a\"", {"not JSON", "unexpected end of input"});
  expect_bad("{\"text\": \"a\"} more", {"byte 15 ", "not JSON", "invalid literal"});
  expect_bad("{'text': 'a'}", {"byte 2 ", "not JSON"});
  expect_bad("{\"text\": nul}", {"not JSON", "invalid literal"});
  expect_bad("{\"text\": \"\\x41\"}", {"not JSON", "forbidden character after backslash"});
  expect_bad("{\"text\": \"\\ud83d alone\"}", {"not JSON", "surrogate U+D800..U+DBFF must be"});
  expect_bad("{\"text\": \"\\ude00 alone\"}", {"not JSON", "surrogate U+DC00..U+DFFF must follow"});
  expect_bad("{\"text\": \"\\ud83d\\ud83d\"}", {"not JSON", "must be followed by U+DC00"});
  expect_bad("{\"text\": \"\\u12g4\"}", {"not JSON", "4 hex digits"});
  expect_bad("{\"text\": \"caf\xe9 au lait\"}", {"not JSON", "ill-formed UTF-8"});
  expect_bad("{\"text\": \"\xed\xa0\x80\"}", {"not JSON", "ill-formed UTF-8"});
  expect_bad("{\"text\": \"tab\there\"}", {"not JSON", "control character"});
  expect_bad("{\"text\": " + std::string(100000, '1') + "}",
             {"ends at byte 100009 ", "larger than a double"});
  expect_bad("{\"id\": 1e999, \"text\": \"a\"}", {"ends at byte 12 ", "larger than a double"});
  expect_bad("[\"text\"]", {"is an array, not a JSON object with a field 'text'"});
  expect_bad("\"text\"", {"is a string, not a JSON object"});
  expect_bad("17", {"is a number, not a JSON object"});
  expect_bad("{\"body\": \"a\"}", {"has no field 'text'"});
  expect_bad("{\"meta\": {\"text\": \"a\"}}", {"has no field 'text'"});
  expect_bad("{\"text\": 17}", {"field 'text' is a number, not a string"});
  expect_bad("{\"text\": null}", {"field 'text' is null, not a string"});
  expect_bad("{\"text\": [\"a\"]}", {"field 'text' is an array, not a string"});
  expect_bad("{\"text\": {}}", {"field 'text' is an object, not a string"});
  expect_bad("{\"text\": \"a\", \"text\": \"b\"}", {"two fields 'text'"});
  expect_bad("plain text", {"byte 1 ", "not JSON"});
}

// ---- The same text in two splits

TEST(SplitOverlap, CountsHeldOutDocumentsWhoseTextIsElsewhere) {
  SplitOverlap overlap;
  const auto add = [&](SplitIndex split, const std::vector<std::string>& parts) {
    for (const std::string& part : parts) overlap.add(part);
    overlap.end_document(split, {"", "of " + parts[0], ""});
  };
  add(kTrain, {"a"});
  add(kTrain, {"a"});  // twice in one split is none
  add(kTrain, {"b", "c"});
  add(kValid, {"other"});
  EXPECT_THAT(overlap.notes(), IsEmpty());
  add(kValid, {"b", "c"});
  add(kTest, {"a"});
  add(kTest, {"a"});
  add(kTest, {"other"});
  add(kTest, {"b", "d"});
  EXPECT_THAT(
      overlap.notes(),
      ElementsAre("warning: 1 of the 2 documents of valid have the same text as documents of train "
                  "(the first: of b)",
                  "warning: 2 of the 4 documents of test have the same text as documents of train "
                  "(the first: of a)",
                  "warning: 1 of the 4 documents of test have the same text as documents of valid "
                  "(the first: of other)"));
}

// More texts than are kept: of 600,000 in train and 60,000 in valid, 20,000 are the same.
TEST(SplitOverlap, EstimatesFromASampleOfManyTexts) {
  SplitOverlap overlap;
  const auto add = [&](SplitIndex split, int number) {
    overlap.add(std::to_string(number));
    overlap.end_document(split, {"", std::to_string(number), ""});
  };
  for (int i = 0; i < 600000; ++i) add(kTrain, i);
  for (int i = 580000; i < 640000; ++i) add(kValid, i);
  const std::vector<std::string> notes = overlap.notes();
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_THAT(notes[0], AllOf(HasSubstr("warning: about "), HasSubstr(" of the 60000 documents"),
                              HasSubstr("by a sample of 1 in 4 texts")));
  // A quarter of 20,000, with a standard deviation of 61: five of them.
  EXPECT_NEAR(std::stod(notes[0].substr(15)), 20000, 4 * 5 * 61);
}

TEST(SplitOverlap, IsNotedByPrepare) {
  const TemporaryFolder folder;
  write_text(folder / "train.txt", "one\ntwo\nthree\ntwo\n");
  write_text(folder / "valid.txt", "four\ntwo\nfive\n");
  PrepareOptions options = prepare_options(folder / "corpus", {folder / "train.txt"}, "chars");
  options.valid_paths = {folder / "valid.txt"};
  options.format = {TextFormat::kLines};
  EXPECT_THAT(prepare_corpus(options).notes,
              ElementsAre("warning: 1 of the 3 documents of valid have the same text as documents "
                          "of train (the first: " +
                          folder / "valid.txt:2" + ")"));
}

}  // namespace
}  // namespace birkhoff
