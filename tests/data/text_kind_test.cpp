// Prepare of documents that are not plain UTF-8: their handling and reports.
#include "data/prepare/input/text_kind.h"
#include "data/corpus/verify.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/data/helpers.h"
#include "tests/data/prepare_helpers.h"

namespace birkhoff {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using namespace std::string_literals;

constexpr char kMark[] = "\xef\xbb\xbf";

class OddTexts : public testing::Test {
 protected:
  // The notes on a corpus of these texts, all in the train split.
  std::vector<std::string> notes_on(const std::vector<std::string>& texts,
                                    const std::string& tokenizer, std::int64_t chunk_bytes = 0) {
    remove_tree(folder_ / "in");
    remove_tree(folder_ / "corpus");
    for (std::size_t i = 0; i < texts.size(); ++i)
      write_text(folder_ / fmt::format("in/{}", i), texts[i]);
    PrepareOptions options = prepare_options(folder_ / "corpus", {folder_ / "in"}, tokenizer);
    options.valid_fraction = 0;
    options.chunk_bytes = chunk_bytes;
    return prepare_corpus(options).notes;
  }
  std::string prepared_text() const { return text_of(Corpus(folder_ / "corpus"), "train"); }

  TemporaryFolder folder_;
};

TEST_F(OddTexts, PlainTextNeedsNoNote) {
  for (const std::string tokenizer : {"bytes", "chars", "words"}) {
    EXPECT_THAT(notes_on({"text", "PKzip is a program", "BZh is no word", "\xc3\xa4"}, tokenizer),
                IsEmpty());
  }
}

// In the text it would be an invisible character, and generated text might begin with it.
TEST_F(OddTexts, TheMarkOfUtf8IsDroppedFromText) {
  for (const std::string tokenizer : {"chars", "words"}) {
    EXPECT_THAT(notes_on({kMark + "one"s, "two", kMark + "three"s}, tokenizer),
                ElementsAre(AllOf(HasSubstr("dropped the byte order mark"),
                                  HasSubstr("2 documents"), HasSubstr(folder_ / "in/0"))));
    EXPECT_EQ(prepared_text(), "onetwothree") << tokenizer;
    EXPECT_EQ(Corpus(folder_ / "corpus").split("train").counts().bytes(), 11);
  }
  EXPECT_THAT(notes_on({"a" + std::string(kMark) + "b"}, "chars"), IsEmpty());
  EXPECT_EQ(prepared_text(), "a" + std::string(kMark) + "b") << "elsewhere it is a character";
  EXPECT_THAT(notes_on({kMark + "one"s}, "bytes"),
              ElementsAre(AllOf(HasSubstr("kept the byte order mark"), HasSubstr("1 document "))));
  EXPECT_EQ(prepared_text(), kMark + "one"s);
}

TEST_F(OddTexts, ADocumentOfNothingButAMarkIsNone) {
  notes_on({kMark, "text"}, "chars");
  EXPECT_EQ(Corpus(folder_ / "corpus").split("train").counts().documents(), 1);
  verify_corpus(Corpus(folder_ / "corpus"));
  expect_error(ExitCode::kUsage, [&] { notes_on({kMark}, "chars"); },
               {"the train split gets nothing"});
}

TEST_F(OddTexts, BytesTakeEverythingAndSaySo) {
  const std::vector<std::string> texts = {
      "\xfd"
      "7zXZ\0 xz"s,
      "\xff\xfew\0i\0d\0e\0"s,
      "binary\0data"s,
      "more\0binary\0data"s,
      "PK\x03\x04 zip",
      "text"};
  for (const std::int64_t chunk_bytes : {0, 5}) {
    EXPECT_THAT(
        notes_on(texts, "bytes", chunk_bytes),
        ElementsAre(
            AllOf(HasSubstr("1 document of xz data"),
                  HasSubstr("xzcat " + folder_ / "in/0" + " | birkhoff ... -")),
            AllOf(HasSubstr("1 document of zip data"), HasSubstr("unzip -p " + folder_ / "in/4")),
            AllOf(HasSubstr("1 document of UTF-16"), HasSubstr("iconv -f UTF-16 -t UTF-8")),
            AllOf(HasSubstr("2 documents with NUL bytes"),
                  HasSubstr("the first: " + folder_ / "in/2"))));
    std::string all;
    for (const std::string& text : texts) all += text;
    EXPECT_EQ(prepared_text(), all);
  }
}

TEST_F(OddTexts, NulIsNoCharacter) {
  for (const char* tokenizer : {"chars", "words", "sentencepiece"}) {
    expect_error(ExitCode::kData, [&] { notes_on({"text\0text"s}, tokenizer); },
                 {folder_ / "in/0", "byte 4 is NUL", "use bytes"});
  }
  // UTF-16 without a mark.
  expect_error(ExitCode::kData, [&] { notes_on({"w\0i\0d\0e\0"s}, "chars"); },
               {"byte 1 is NUL", "iconv -f UTF-16 -t UTF-8"});
}

TEST_F(OddTexts, Utf32IsNotUtf16) {
  for (const std::string& text : {"\xff\xfe\0\0w\0\0\0"s, "\0\0\xfe\xff\0\0\0w"s}) {
    expect_error(ExitCode::kData, [&] { notes_on({text}, "chars"); },
                 {"holds UTF-32", "iconv -f UTF-32 -t UTF-8 "});
    EXPECT_THAT(notes_on({text}, "bytes"), ElementsAre(HasSubstr("1 document of UTF-32")));
  }
}

TEST_F(OddTexts, ThePlaceOfWhatIsNoUtf8CountsTheMark) {
  expect_error(ExitCode::kData, [&] { notes_on({kMark + "caf\xe9 au lait"s}, "chars"); },
               {folder_ / "in/0", "byte 6"});
}

}  // namespace
}  // namespace birkhoff
