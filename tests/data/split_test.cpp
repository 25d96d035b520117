// The assignment of text to splits: shares of bytes, inputs, official splits.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <map>
#include <random>
#include <set>

#include "data/corpus/verify.h"
#include "data/prepare/input/split_rule.h"
#include "tests/data/helpers.h"
#include "tests/data/prepare_helpers.h"

namespace birkhoff {
namespace {

using Shares = std::array<double, 3>;
constexpr std::array<SplitIndex, 3> kSplits = {kTrain, kValid, kTest};

double bytes_of(const Corpus& corpus, const char* split) {
  return static_cast<double>(corpus.split(split).counts().bytes());
}

// The bytes of each document in each split, by name.
using Given = std::map<std::string, std::array<std::int64_t, 3>>;

// Simulates files of given sizes: all documents are parts of one long ASCII file at `path`.
class Texts {
 public:
  explicit Texts(std::int64_t longest) {
    File file = File::create(path());
    const std::string part(1 << 16, 'x');
    for (std::int64_t done = 0; done < longest; done += 1 << 16) file.write_all(part);
    file.close();
  }

  void add(std::int64_t input, const std::string& name, std::int64_t bytes) {
    if (static_cast<std::size_t>(input) >= scan_.input_bytes.size())
      scan_.input_bytes.resize(static_cast<std::size_t>(input) + 1);
    scan_.input_bytes[static_cast<std::size_t>(input)] += bytes;
    ++scan_.documents;
    ++scan_.documents_of[kTrain];
    scan_.bytes += bytes;
    documents_.push_back({path(), name, name, bytes, kTrain, input});
  }

  Given given(double valid, double test) const {
    SplitRule rule(scan_, valid, test);
    Given given;
    for (const Document& document : documents_) {
      std::int64_t end = 0;
      for (const DocumentPiece& piece : rule.pieces(document)) {
        EXPECT_EQ(piece.begin, end) << "a document's pieces are all of it, in order";
        EXPECT_LT(piece.begin, piece.end);
        end = piece.end;
        given[fmt::format("{}/{}", document.input, document.name)][piece.split] +=
            piece.end - piece.begin;
      }
      EXPECT_EQ(end, document.bytes);
    }
    return given;
  }

  // The shares of the documents whose "input/name" starts with `start`.
  static Shares shares(const Given& given, const std::string& start = "") {
    Shares bytes = {};
    for (const auto& [name, parts] : given) {
      if (!name.starts_with(start)) continue;
      for (const SplitIndex split : kSplits) bytes[split] += static_cast<double>(parts[split]);
    }
    const double sum = bytes[kTrain] + bytes[kValid] + bytes[kTest];
    for (double& share : bytes) share /= sum;
    return bytes;
  }

 private:
  std::string path() const { return folder_ / "text"; }

  TemporaryFolder folder_;
  InputScan scan_;
  std::vector<Document> documents_;
};

// The shares are right in each input separately, whatever the sizes: from a few large documents to
// thousands.
TEST(SplitRule, SharesAreAsAskedInEveryInput) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 60; ++trial) {
    Texts texts(1 << 20);
    const int inputs = 1 + trial % 4;
    for (int input = 0; input < inputs; ++input) {
      const int documents = 1 << (random() % 12);
      const double spread = 1 + static_cast<double>(random() % 6);
      for (int i = 0; i < documents; ++i) {
        // Sizes from 200 bytes to 1 MiB, over a few orders of magnitude.
        const double u = static_cast<double>(random() % 1000) / 1000;
        texts.add(input, fmt::format("file{}", i),
                  static_cast<std::int64_t>(200 * std::pow(2.0, 2 * spread * u)));
      }
    }
    for (const auto& [valid, test] : std::vector<std::pair<double, double>>{
             {0.1, 0}, {0.1, 0.05}, {0.01, 0}, {0, 0.2}, {0.5, 0.3}, {0.9, 0.05}, {0.05, 0.9}}) {
      const Given given = texts.given(valid, test);
      for (int input = 0; input < inputs; ++input) {
        const Shares shares = Texts::shares(given, fmt::format("{}/", input));
        SCOPED_TRACE(testing::Message() << "trial " << trial << " input " << input << " of "
                                        << inputs << ", " << valid << " " << test);
        // A cut through a few hundred bytes is off by about a byte.
        EXPECT_NEAR(shares[kValid], valid, 0.01);
        EXPECT_NEAR(shares[kTest], test, 0.01);
        if (valid > 0) {
          EXPECT_GT(shares[kValid], valid / 3);
        }
        if (test > 0) {
          EXPECT_GT(shares[kTest], test / 3);
        }
        EXPECT_GT(shares[kTrain], 0);
      }
    }
  }
}

TEST(SplitRule, SmallDocumentsStayWholeAndLargeOnesAreInEverySplit) {
  Texts texts(1 << 20);
  for (int i = 0; i < 1000; ++i) texts.add(0, fmt::format("small{:03}", i), 1000 + i);
  for (int i = 0; i < 3; ++i) texts.add(0, fmt::format("large{}", i), 500000);
  int whole_in_valid = 0;
  for (const auto& [name, parts] : texts.given(0.1, 0.1)) {
    if (name.starts_with("0/large")) {
      EXPECT_EQ(parts, (std::array<std::int64_t, 3>{400000, 50000, 50000})) << name;
    } else {
      EXPECT_EQ(std::count(parts.begin(), parts.end(), 0), 2) << name;
      whole_in_valid += parts[kValid] > 0;
    }
  }
  EXPECT_NEAR(whole_in_valid, 100, 10);
}

// Documents are drawn, not counted off: every tenth document of a folder might be of one kind.
TEST(SplitRule, HeldOutDocumentsFollowNoPeriod) {
  Texts texts(1 << 10);
  for (int i = 0; i < 4000; ++i) texts.add(0, fmt::format("{:04}", i), 100);
  const Given given = texts.given(0.1, 0);
  std::array<int, 10> by_last_digit = {};
  int number = 0;
  for (const auto& [name, parts] : given)
    by_last_digit[static_cast<std::size_t>(number++ % 10)] += parts[kValid] > 0;
  for (const int count : by_last_digit) EXPECT_NEAR(count, 40, 25);
}

TEST(SplitRule, TheSecondPassIsTheFirst) {
  InputScan scan;
  scan.input_bytes = {100000};
  scan.documents = scan.documents_of[kTrain] = 1000;
  SplitRule rule(scan, 0.2, 0.1);
  const auto splits = [&] {
    rule.reset();
    std::vector<int> found;
    for (int i = 0; i < 1000; ++i) {
      const std::string name = std::to_string(i);
      found.push_back(rule.pieces({"", name, name, 100, kTrain, 0}).at(0).split);
    }
    return found;
  };
  const std::vector<int> first = splits();
  EXPECT_EQ(splits(), first);
  EXPECT_EQ((std::set<int>(first.begin(), first.end())), (std::set<int>{0, 1, 2}));
}

// The command in the README once held out one of two files of about the same size.
TEST(Prepare, AFewFilesAreCutNotHeldOut) {
  TemporaryFolder folder;
  const std::string alice = sentences(500, 1), bob = sentences(150, 2), notes = sentences(600, 3);
  write_text(folder / "texts/alice", alice);
  write_text(folder / "texts/bob", bob);
  write_text(folder / "notes", notes);
  PrepareOptions options = prepare_options(folder / "corpus", {folder / "texts", folder / "notes"});
  options.test_fraction = 0.05;
  prepare_corpus(options);
  const Corpus corpus(folder / "corpus");
  verify_corpus(corpus);
  const double all = static_cast<double>(alice.size() + bob.size() + notes.size());
  EXPECT_NEAR(bytes_of(corpus, "train"), 0.85 * all, 0.01 * all);
  EXPECT_NEAR(bytes_of(corpus, "valid"), 0.10 * all, 0.01 * all);
  EXPECT_NEAR(bytes_of(corpus, "test"), 0.05 * all, 0.01 * all);
  // Each piece is a document of its split and ends in the mark; concatenated, they are the texts.
  std::array<std::string, 3> together;
  for (const std::string split : {"train", "valid", "test"}) {
    EXPECT_EQ(corpus.split(split).counts().documents(), 3) << split;
    std::size_t document = 0;
    for (const std::int32_t id : tokens_of(corpus, split)) {
      if (id == 256) {
        ++document;
      } else {
        together.at(document) += static_cast<char>(id);
      }
    }
    EXPECT_EQ(document, 3u) << split;
  }
  EXPECT_EQ(together, (std::array<std::string, 3>{alice, bob, notes}));
}

TEST(Prepare, SharesHoldForAFolderInSortedOrder) {
  TemporaryFolder folder;
  std::map<std::string, std::string> texts;
  double all = 0;
  for (int i = 0; i < 700; ++i) texts[fmt::format("{}/{:03}", i % 3, i)] = sentences(1 + i % 5, i);
  for (const auto& [name, text] : texts) {
    write_text(folder / ("in/" + name), text);
    all += static_cast<double>(text.size());
  }
  PrepareOptions options = prepare_options(folder / "corpus", {folder / "in"});
  options.test_fraction = 0.2;
  prepare_corpus(options);
  const Corpus corpus(folder / "corpus");
  EXPECT_EQ(corpus.vocabulary(), 257);
  EXPECT_NEAR(bytes_of(corpus, "valid"), 0.1 * all, 0.01 * all);
  EXPECT_NEAR(bytes_of(corpus, "test"), 0.2 * all, 0.01 * all);
  std::multiset<std::string> found;
  for (const std::string split : {"train", "valid", "test"}) {
    std::string document, last_name;
    std::set<char> folders;
    for (const std::int32_t id : tokens_of(corpus, split)) {
      if (id != 256) {
        document += static_cast<char>(id);
        continue;
      }
      found.insert(document);
      for (const auto& [name, text] : texts) {
        if (text != document) continue;
        EXPECT_LT(last_name, name) << split;
        last_name = name;
        folders.insert(name[0]);
      }
      document.clear();
    }
    EXPECT_EQ(document, "");
    EXPECT_EQ(folders.size(), 3u) << split;
  }
  std::multiset<std::string> expected;
  for (const auto& entry : texts) expected.insert(entry.second);
  EXPECT_EQ(found, expected);  // so none was cut: each is less than 1/256 of the text
}

TEST(Prepare, SplitsDoNotDependOnChunksAndShards) {
  TemporaryFolder folder;
  for (int i = 0; i < 300; ++i)
    write_text(folder / fmt::format("in/{}", i), sentences(i % 40 == 0 ? 200 : 1 + i % 7, i));
  PrepareOptions options = prepare_options(folder / "corpus", {folder / "in"}, "chars");
  options.test_fraction = 0.1;
  prepare_corpus(options);
  PrepareOptions other = options;
  other.out = folder / "other";
  other.chunk_bytes = 100;
  other.shard_tokens = 500;
  prepare_corpus(other);
  for (const std::string split : {"train", "valid", "test"}) {
    EXPECT_EQ(tokens_of(Corpus(options.out), split), tokens_of(Corpus(other.out), split)) << split;
  }
}

// A shell expands *.txt: thousands of files are not thousands of inputs.
TEST(Prepare, ManyPathsAreOneInput) {
  TemporaryFolder folder;
  std::vector<std::string> paths;
  for (int i = 0; i < 400; ++i) {
    paths.push_back(folder / fmt::format("{:03}", i));
    write_text(paths.back(), sentences(2, i));
  }
  prepare_corpus(prepare_options(folder / "corpus", paths));
  const Corpus corpus(folder / "corpus");
  EXPECT_EQ(corpus.split("train").counts().documents() + corpus.split("valid").counts().documents(),
            400);
  EXPECT_NEAR(static_cast<double>(corpus.split("valid").counts().documents()), 40, 4);
}

TEST(Prepare, TakesOfficialSplits) {
  TemporaryFolder folder;
  const std::string train = sentences(100, 1), valid = sentences(20, 2), test = sentences(10, 3);
  write_text(folder / "train", train);
  write_text(folder / "valid", valid);
  write_text(folder / "test", test + "z");
  PrepareOptions options = prepare_options(folder / "all", {folder / "train"}, "chars");
  options.valid_paths = {folder / "valid"};
  options.test_paths = {folder / "test"};
  prepare_corpus(options);
  EXPECT_TRUE(prepare_corpus(options).already_prepared);
  const Corpus corpus(folder / "all");
  EXPECT_EQ(text_of(corpus, "train"), train);
  EXPECT_EQ(text_of(corpus, "valid"), valid);
  EXPECT_EQ(text_of(corpus, "test"), test + "\ufffd");  // the tokenizer was learned from train
  EXPECT_FALSE(corpus.manifest().tokenizer().has_end_of_document()) << "one document a split";
  // One official split; the other is held out from train.
  options.out = folder / "some";
  options.test_paths = {};
  options.test_fraction = 0.2;
  prepare_corpus(options);
  const Corpus some(folder / "some");
  EXPECT_EQ(text_of(some, "train") + text_of(some, "test"), train);
  EXPECT_EQ(text_of(some, "valid"), valid);
  EXPECT_NEAR(bytes_of(some, "test"), 0.2 * static_cast<double>(train.size()), 4);
  // The same text, but another split.
  options.out = folder / "all";
  expect_error(ExitCode::kUsage, [&] { prepare_corpus(options); }, {"other options", "test given"});
  PrepareOptions plain = prepare_options(folder / "all", {folder / "train"}, "chars");
  plain.valid_paths = {folder / "test"};
  plain.test_paths = {folder / "valid"};
  expect_error(ExitCode::kUsage, [&] { prepare_corpus(plain); }, {"other text"});
  write_text(folder / "nothing", "");
  options = prepare_options(folder / "new", {folder / "train"});
  options.valid_paths = {folder / "nothing"};
  expect_error(ExitCode::kUsage, [&] { prepare_corpus(options); },
               {"no text", "valid", folder / "nothing"});
}

TEST(Prepare, RefusesATextThatIsGivenTwice) {
  TemporaryFolder folder;
  write_text(folder / "in/deep/a", sentences(10, 1));
  write_text(folder / "b", sentences(10, 2));
  ASSERT_EQ(symlink("b", (folder / "link").c_str()), 0);
  const auto refuse = [&](const std::vector<std::string>& paths, const std::string& name) {
    expect_error(ExitCode::kUsage,
                 [&] { prepare_corpus(prepare_options(folder / "corpus", paths)); },
                 {name, "given twice"});
  };
  refuse({folder / "b", folder / "b"}, folder / "b");
  refuse({folder / "b", folder / "link"}, folder / "b");
  refuse({folder / "in", folder / "in/deep/a"}, folder / "in/deep/a");
  refuse({folder / "in/deep", folder / "in"}, folder / "in/deep");
  PrepareOptions options = prepare_options(folder / "corpus", {folder / "b"});
  options.valid_paths = {folder / "b"};
  expect_error(ExitCode::kUsage, [&] { prepare_corpus(options); }, {"given twice"});
  options = prepare_options(folder / "corpus", {"-"});
  options.test_paths = {"-"};
  expect_error(ExitCode::kUsage, [&] { prepare_corpus(options); }, {"standard input", "twice"});
}

}  // namespace
}  // namespace birkhoff
