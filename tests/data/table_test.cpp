// prepare of tables: columns, rows, classes, splits, and what it refuses.
#include "data/prepare/table.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <fstream>
#include <set>
#include <thread>

#include "data/corpus/corpus.h"
#include "data/corpus/verify.h"
#include "data/prepare/classes.h"
#include "data/text/text_lines.h"
#include "tests/data/helpers.h"
#include "tests/data/prepare_helpers.h"
#include "tests/sample_data.h"

namespace birkhoff {
namespace {

using Labels = std::vector<std::int64_t>;

PrepareOptions table_options(const std::string& out, std::vector<std::string> paths,
                             const TableColumns& columns = {"text", "label"},
                             const std::string& tokenizer = "bytes") {
  PrepareOptions options = prepare_options(out, std::move(paths), tokenizer);
  options.valid_fraction = 0;
  options.table = columns;
  return options;
}

std::vector<std::string> classes_of(const Corpus& corpus) {
  const auto& record = corpus.record("train", "label");
  return {record.class_name().begin(), record.class_name().end()};
}

// Rows "sentence i<tab>label".
std::string rows(int count, int seed, const std::vector<std::string>& labels = {"0", "1"}) {
  std::string table;
  for (int i = 0; i < count; ++i) {
    std::string line = sentences(1 + (i + seed) % 3, seed + i);
    std::replace(line.begin(), line.end(), '\n', ' ');
    table += line + "\t" + labels[static_cast<std::size_t>(i * 7 + seed) % labels.size()] + "\n";
  }
  return table;
}

TEST(Tables, RowsAreDocumentsWithLabels) {
  TemporaryFolder folder;
  write_text(folder / "train.tsv", "id\ttext\tlabel\n1\ta cat\tpos\n2\tno dogs \tneg\n3\tü\tpos\n");
  write_text(folder / "valid.tsv", "label\ttext\nneg\ta dog?");  // the columns in another order
  for (const std::string tokenizer : {"bytes", "chars", "words"}) {
    SCOPED_TRACE(tokenizer);
    PrepareOptions options =
        table_options(folder / tokenizer, {folder / "train.tsv"}, {"text", "label"}, tokenizer);
    options.valid_paths = {folder / "valid.tsv"};
    prepare_corpus(options);
    const Corpus corpus(folder / tokenizer);
    verify_corpus(corpus);
    EXPECT_EQ(document_texts(corpus, "train"),
              (std::vector<std::string>{"a cat", "no dogs ", "ü"}));
    EXPECT_EQ(labels_of(corpus, "train"), (Labels{1, 0, 1}));
    EXPECT_EQ(labels_of(corpus, "valid"), Labels{0});
    EXPECT_EQ(classes_of(corpus), (std::vector<std::string>{"neg", "pos"}));
    const auto& counts = corpus.split("train").counts();
    EXPECT_EQ(counts.documents(), 3);
    EXPECT_EQ(counts.bytes(), 5 + 8 + 2);
    EXPECT_EQ(counts.characters(), 5 + 8 + 1);
  }
  // The vocabulary is that of the texts of train: not of labels, other columns or other splits.
  EXPECT_EQ(read_text(folder / "chars/tokenizer.chars"),
            "birkhoff chars 1\nunknown yes\n20\n61\n63\n64\n67\n6e\n6f\n73\n74\nfc\n");
}

TEST(Tables, ColumnsByNumberHaveNoHeader) {
  TemporaryFolder folder;
  write_text(folder / "t.tsv", "\xef\xbb\xbfgood\tx\t1\r\nbad\ty\t0\r\n");
  prepare_corpus(table_options(folder / "corpus", {folder / "t.tsv"}, {"1", "3"}));
  const Corpus corpus(folder / "corpus");
  EXPECT_EQ(document_texts(corpus, "train"), (std::vector<std::string>{"good", "bad"}));
  EXPECT_EQ(labels_of(corpus, "train"), (Labels{1, 0}));
  // Unless there is said to be one. A name implies it.
  for (const TableColumns& columns :
       {TableColumns{"1", "3", true}, TableColumns{"good", "3"}, TableColumns{"good", "1"}}) {
    const std::string out = folder / ("header-" + columns.text + columns.label);
    write_text(folder / "h.tsv", "\xef\xbb\xbfgood\tx\t1\r\nbad\ty\t0\r\nbest\tz\t2\r\n");
    prepare_corpus(table_options(out, {folder / "h.tsv"}, {columns.text, "3", columns.header}));
    EXPECT_EQ(document_texts(Corpus(out), "train"), (std::vector<std::string>{"bad", "best"}));
    EXPECT_EQ(classes_of(Corpus(out)), (std::vector<std::string>{"0", "2"}));
    remove_tree(out);
  }
}

TEST(Tables, RowsMayBePairsOfTexts) {
  TemporaryFolder folder;
  write_text(folder / "train.tsv", "a\tlabel\tb\na cat\tyes\tcats\nno dogs\tno\ta big dog\n");
  write_text(folder / "valid.tsv", "label\tb\ta\nno\tdog\tno dogs\n");
  for (const std::string tokenizer : {"bytes", "chars", "words"}) {
    PrepareOptions options =
        table_options(folder / tokenizer, {folder / "train.tsv"}, {"a", "label"}, tokenizer);
    options.table->second = "b";
    options.valid_paths = {folder / "valid.tsv"};
    prepare_corpus(options);
    const Corpus corpus(folder / tokenizer);
    verify_corpus(corpus);
    EXPECT_EQ(document_texts(corpus, "train"), (std::vector<std::string>{"a cat", "no dogs"}));
    EXPECT_EQ(document_text(corpus, "train", 0, "second"), "cats");
    EXPECT_EQ(document_text(corpus, "train", 1, "second"), "a big dog");
    EXPECT_EQ(document_text(corpus, "valid", 0, "second"),
              tokenizer == "words" ? document_text(corpus, "valid", 0, "second") : "dog");
    EXPECT_EQ(labels_of(corpus, "train"), (Labels{1, 0}));
    EXPECT_EQ(labels_of(corpus, "valid"), Labels{0});
    EXPECT_EQ(corpus.split("train").counts().bytes(), 5 + 7) << "those of the first texts";
    EXPECT_TRUE(prepare_corpus(options).already_prepared);
    options.table->second = "";
    expect_error(ExitCode::kUsage, [&] { prepare_corpus(options); }, {"other options"});
  }
  // One tokenizer, which knows the letters of both.
  EXPECT_EQ(read_text(folder / "chars/tokenizer.chars"),
            "birkhoff chars 1\nunknown no\n20\n61\n62\n63\n64\n67\n69\n6e\n6f\n73\n74\n");
}

TEST(Tables, FoldersAndStreamsAreTables) {
  TemporaryFolder folder;
  write_text(folder / "in/a.tsv", "text\tlabel\na\t0\n");
  write_text(folder / "in/b/c.tsv", "text\tlabel\nb\t1\nc\t0\n");
  write_text(folder / "in/d.tsv", "text\tlabel\n");  // no rows
  prepare_corpus(table_options(folder / "corpus", {folder / "in"}));
  EXPECT_EQ(document_texts(Corpus(folder / "corpus"), "train"),
            (std::vector<std::string>{"a", "b", "c"}));
  const std::string pipe = folder / "pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  PrepareOptions options = table_options(folder / "stream", {pipe});
  for (const bool again : {false, true}) {
    std::thread feeder([&] { std::ofstream(pipe) << "text\tlabel\na\t0\nb\t1\n"; });
    EXPECT_EQ(prepare_corpus(options).already_prepared, again);
    feeder.join();
  }
  EXPECT_EQ(labels_of(Corpus(folder / "stream"), "train"), (Labels{0, 1}));
}

TEST(Tables, FractionsHoldOutWholeRows) {
  TemporaryFolder folder;
  write_text(folder / "t.tsv", rows(3000, 1));
  PrepareOptions options = table_options(folder / "corpus", {folder / "t.tsv"}, {"1", "2"});
  options.valid_fraction = 0.2;
  options.test_fraction = 0.1;
  prepare_corpus(options);
  const Corpus corpus(folder / "corpus");
  verify_corpus(corpus);
  std::multiset<std::pair<std::string, std::int64_t>> expected, found;
  std::ifstream table(folder / "t.tsv");
  double all = 0;
  for (std::string line; std::getline(table, line);) {
    const std::size_t tab = line.find('\t');
    expected.emplace(line.substr(0, tab), line[tab + 1] - '0');
    all += static_cast<double>(tab);
  }
  for (const auto& [split, share] :
       std::map<std::string, double>{{"train", 0.7}, {"valid", 0.2}, {"test", 0.1}}) {
    const std::vector<std::string> texts = document_texts(corpus, split);
    const Labels labels = labels_of(corpus, split);
    ASSERT_EQ(texts.size(), labels.size());
    for (std::size_t i = 0; i < texts.size(); ++i) found.emplace(texts[i], labels[i]);
    EXPECT_NEAR(static_cast<double>(corpus.split(split).counts().bytes()), share * all, 0.01 * all);
  }
  EXPECT_EQ(found, expected);
}

// A dozen rows are large documents by the rule for files, which would cut them.
TEST(Tables, FewRowsAreNotCut) {
  TemporaryFolder folder;
  write_text(folder / "t.tsv", rows(12, 1));
  PrepareOptions options = table_options(folder / "corpus", {folder / "t.tsv"}, {"1", "2"});
  options.valid_fraction = 0.25;
  prepare_corpus(options);
  const Corpus corpus(folder / "corpus");
  const auto train = corpus.split("train").counts().documents(),
             valid = corpus.split("valid").counts().documents();
  EXPECT_EQ(train + valid, 12);
  EXPECT_GE(valid, 1);
  EXPECT_LE(valid, 5);
}

// A text has the same tokens in a table of one row as among many.
TEST(Tables, ASingleRowEndsInTheMark) {
  TemporaryFolder folder;
  write_text(folder / "train.tsv", "a\t0\n");
  write_text(folder / "test.tsv", "b\t1\n");
  PrepareOptions options = table_options(folder / "corpus", {folder / "train.tsv"}, {"1", "2"});
  options.test_paths = {folder / "test.tsv"};
  prepare_corpus(options);
  EXPECT_EQ(tokens_of(Corpus(folder / "corpus"), "train"), (std::vector<std::int32_t>{'a', 256}));
  EXPECT_EQ(tokens_of(Corpus(folder / "corpus"), "test"), (std::vector<std::int32_t>{'b', 256}));
}

TEST(Tables, TheSameCommandFindsItsWorkDone) {
  TemporaryFolder folder;
  write_text(
      folder / "t.tsv", "text\tlabel\tother\n" + [] {
        std::string table = rows(200, 1);
        for (std::size_t at = 0; (at = table.find('\n', at)) != std::string::npos; at += 3)
          table.replace(at, 1, "\tx\n");
        return table;
      }());
  PrepareOptions options = table_options(folder / "corpus", {folder / "t.tsv"});
  options.valid_fraction = 0.1;
  options.shard_tokens = 100;  // rows, too: several shards
  prepare_corpus(options);
  EXPECT_TRUE(prepare_corpus(options).already_prepared);
  options.table->header = true;  // says what the names say
  EXPECT_TRUE(prepare_corpus(options).already_prepared);
  EXPECT_EQ(Corpus(options.out).record("train", "label").shard_size(), 2);
  const auto content = content_of(options.out);
  PrepareOptions other = options;
  other.out = folder / "again";
  prepare_corpus(other);
  EXPECT_EQ(content_of(other.out), content);
  other = options;
  other.table->label = "other";
  const auto refused = [&] {
    expect_error(ExitCode::kUsage, [&] { prepare_corpus(other); }, {"other options", "label"});
  };
  refused();
  other.table = TableColumns{"1", "2", false};
  refused();
  other = options;
  other.class_names = {"0", "1", "2"};
  refused();
  other.table = std::nullopt;
  other.class_names = {};
  refused();
  EXPECT_EQ(content_of(options.out), content);
  // Other times are not other rows.
  const timespec times[] = {{1000, 0}, {1000, 0}};
  ASSERT_EQ(utimensat(AT_FDCWD, (folder / "t.tsv").c_str(), times, 0), 0);
  EXPECT_TRUE(prepare_corpus(options).already_prepared);
}

// Corpora without labels are what they were before there were tables.
TEST(Tables, LeaveCorporaOfTextAsTheyWere) {
  TemporaryFolder folder;
  for (int i = 1; i <= 3; ++i) {
    std::string text;
    for (int j = 1; j <= 8; ++j)
      text += fmt::format("the cat {} sat on mat {}, na\u00efve\n", i, j);
    write_text(folder / fmt::format("in/{}", i), text);
  }
  PrepareOptions options = prepare_options(folder / "corpus", {folder / "in"}, "words");
  options.class_names = {"not", "used"};
  prepare_corpus(options);
  const Corpus corpus(folder / "corpus");
  const auto& manifest = corpus.manifest();
  EXPECT_EQ(
      manifest.source().options(),
      "tokenizer words, vocab size 32000, valid 0.1, test 0, shard tokens 16777216, chunk bytes 1048576, shares of bytes");
  EXPECT_EQ(manifest.fingerprint(), "64cc43cb84cd37b8eb694765dbac508e");
  EXPECT_EQ(read_text(folder / "corpus/manifest.json").find("record"), std::string::npos);
}

TEST(Tables, ClassesAreSortedByNumberOrByBytes) {
  TemporaryFolder folder;
  const auto classes = [&](const std::vector<std::string>& labels) {
    write_text(folder / "t.tsv", rows(40, 1, labels));
    remove_tree(folder / "corpus");
    prepare_corpus(table_options(folder / "corpus", {folder / "t.tsv"}, {"1", "2"}));
    return classes_of(Corpus(folder / "corpus"));
  };
  using Names = std::vector<std::string>;
  EXPECT_EQ(classes({"10", "9", "-1", "0", "100"}), (Names{"-1", "0", "9", "10", "100"}));
  EXPECT_EQ(classes({"10", "9", "x"}), (Names{"10", "9", "x"}));
  EXPECT_EQ(classes({"10", "9", "09"}), (Names{"09", "10", "9"}));  // not plain integers
  EXPECT_EQ(classes({"10", "9", "-0"}), (Names{"-0", "10", "9"}));
  EXPECT_EQ(classes({"10", "9", "1.5"}), (Names{"1.5", "10", "9"}));
  EXPECT_EQ(classes({"b a", "B", "ä", "a"}), (Names{"B", "a", "b a", "ä"}));
  EXPECT_EQ(classes({"9", "1234567890123456789"}), (Names{"1234567890123456789", "9"}));
}

TEST(Tables, TakeTheClassesOfAnotherCorpus) {
  TemporaryFolder folder;
  write_text(folder / "t.tsv", "one\tb\ntwo\tb\n");
  PrepareOptions options = table_options(folder / "corpus", {folder / "t.tsv"}, {"1", "2"});
  options.class_names = {"c", "b", "a"};
  prepare_corpus(options);  // one class is enough if the classes are known
  const Corpus corpus(folder / "corpus");
  EXPECT_EQ(classes_of(corpus), options.class_names);
  EXPECT_EQ(labels_of(corpus, "train"), (Labels{1, 1}));
  EXPECT_TRUE(prepare_corpus(options).already_prepared);
  write_text(folder / "u.tsv", "one\tb\ntwo\td\n");
  options = table_options(folder / "new", {folder / "u.tsv"}, {"1", "2"});
  options.class_names = {"c", "b", "a"};
  expect_error(ExitCode::kData, [&] { prepare_corpus(options); },
               {folder / "u.tsv:2", "'d'", "3 classes of --like: c, b, a"});
}

TEST(Tables, HoldUpTo65536Classes) {
  TemporaryFolder folder;
  std::string table;
  for (int i = 0; i < 65536; ++i) table += fmt::format("x\t{}\n", i);
  write_text(folder / "t.tsv", table);
  prepare_corpus(table_options(folder / "corpus", {folder / "t.tsv"}, {"1", "2"}));
  const Corpus corpus(folder / "corpus");
  verify_corpus(corpus);
  const Labels labels = labels_of(corpus, "train");
  for (std::size_t i = 0; i < 65536; ++i) ASSERT_EQ(labels[i], static_cast<std::int64_t>(i));
  write_text(folder / "u.tsv", table + "x\t65536\n");
  expect_error(ExitCode::kData,
               [&] {
                 prepare_corpus(table_options(folder / "new", {folder / "u.tsv"}, {"1", "2"}));
               },
               {folder / "u.tsv:65537: '65536'", "number 65537", "is that the label column?"});
  // The manifest stays readable, however long the labels are.
  Classes classes({});
  const auto add = [&](int i) {
    const std::string label = std::to_string(i) + std::string(1000, '<');
    Document row;
    row.label = label;
    classes.add(row);
  };
  for (int i = 0; i < 2000; ++i) add(i);
  expect_error(ExitCode::kData,
               [&] {
                 for (int i = 2000; i < 2200; ++i) add(i);
               },
               {"bytes (at most 2097152)", "is that the label column?"});
}

TEST(Tables, LinesHaveALimit) {
  TemporaryFolder folder;
  const std::string longest(kMaxLineBytes - 2, 'x');
  write_text(folder / "t.tsv", "a\t0\n" + longest + "\t1\nb\t1\n" + longest + "\t0");
  prepare_corpus(table_options(folder / "corpus", {folder / "t.tsv"}, {"1", "2"}));
  EXPECT_EQ(document_texts(Corpus(folder / "corpus"), "train"),
            (std::vector<std::string>{"a", longest, "b", longest}));
  for (const std::string end : {"", "\n", "\nb\t1\n"}) {
    write_text(folder / "u.tsv", "a\t0\n" + longest + "x\t1" + end);
    expect_error(ExitCode::kData,
                 [&] {
                   prepare_corpus(table_options(folder / "new", {folder / "u.tsv"}, {"1", "2"}));
                 },
                 {folder / "u.tsv:2", "longer than 1048576 bytes"});
  }
}

TEST(Tables, RefuseWhatTheyCannotUse) {
  TemporaryFolder folder;
  const auto refuse = [&](ExitCode code, const std::string& table, const TableColumns& columns,
                          std::vector<std::string> fragments) {
    write_text(folder / "t.tsv", table);
    PrepareOptions options = table_options(folder / "corpus", {folder / "t.tsv"}, columns, "words");
    fragments.push_back(folder / "t.tsv");
    expect_error(
        code, [&] { prepare_corpus(options); }, fragments);
    EXPECT_FALSE(path_exists(folder / "corpus/manifest.json"));
  };
  const auto usage = [&](const std::string& table, const TableColumns& columns,
                         const std::vector<std::string>& fragments) {
    refuse(ExitCode::kUsage, table, columns, fragments);
  };
  const auto data = [&](const std::string& table, const std::vector<std::string>& fragments) {
    refuse(ExitCode::kData, table, {"text", "label"}, fragments);
  };
  const std::string good = "text\tlabel\na\t0\nb\t1\n";
  usage(good, {"sentence", "label"}, {"t.tsv:1", "--text-column 'sentence'", "'text', 'label'"});
  usage(good, {"text", "Label"}, {"t.tsv:1", "--label-column 'Label'", "'text', 'label'"});
  usage(good, {"1", "3"}, {"t.tsv:1", "--label-column 3", "2 columns", "from 1 to 2"});
  usage(good, {"0", "1"}, {"--text-column 0", "from 1 to 2"});
  usage(good, {"1", "99999999999999999999"}, {"--label-column 99999999999999999999", "2 columns"});
  usage(good, {"1", "text"}, {"t.tsv:1", "same column"});
  usage("text\ttext\tlabel\na\tb\t0\n", {"text", "label"}, {"names it twice", "--header"});
  usage("\n" + good, {"text", "label"}, {"t.tsv:1", "no such column"});
  usage("text\tlabel\n", {"text", "label"}, {"no text"});
  data(good + "c\n", {"t.tsv:4", "1 column,", "line 1 has 2"});
  data(good + "c\t0\t\n", {"t.tsv:4", "3 columns"});
  data(good + "\nc\t0\n", {"t.tsv:4: the line is empty; remove it"});
  data(good + "\t0\n", {"t.tsv:4", "text (column 1) is empty"});
  data(good + "c\t\n", {"t.tsv:4", "label (column 2) is empty"});
  data(good + "c\t\r\n", {"t.tsv:4", "label (column 2) is empty"});
  data(good + "c\tcaf\xe9\n", {"t.tsv:4", "'caf\\xe9'", "not UTF-8", "label column?"});
  data(good +
           "c\ta\x01"
           "b\n",
       {"t.tsv:4", "'a\\x01b'", "control"});
  data(good + "caf\xe9\t0\n", {"t.tsv:4: byte 3 of its text is not UTF-8", "words"});
  data("text\tlabel\na\t0\nb\t0\n", {"'0'", "at least two"});
  data("\x1f\x8b\x08" + good, {"damaged gzip data"});
  data("\xff\xfe" + good, {"UTF-16", "iconv"});
  for (const TableColumns& columns : {TableColumns{"", "1"}, TableColumns{"1", "a\nb"}}) {
    write_text(folder / "t.tsv", good);
    expect_error(
        ExitCode::kUsage,
        [&] { prepare_corpus(table_options(folder / "corpus", {folder / "t.tsv"}, columns)); },
        {columns.text.empty() ? "--text-column" : "--label-column", "UTF-8"});
  }
  write_text(folder / "t.tsv", good + "\n\r\n");
  prepare_corpus(table_options(folder / "corpus", {folder / "t.tsv"}));  // after all that
  verify_corpus(Corpus(folder / "corpus"));
  EXPECT_EQ(Corpus(folder / "corpus").split("train").counts().documents(), 2);
}

TEST(Tables, ARowThatChangesMeanwhileIsNoticed) {
  TemporaryFolder folder;
  write_text(folder / "t.tsv", "a\t0\nb\t1\n");
  const PrepareOptions options = table_options(folder / "corpus", {folder / "t.tsv"}, {"1", "2"});
  for (const std::string changed : {"a\t0\nb\t0\n", "a\t0\nb\t2\n"}) {
    expect_error(ExitCode::kData,
                 [&] {
                   prepare_corpus(options, [&](const PrepareProgress& progress) {
                     if (progress.phase == "read documents") write_text(folder / "t.tsv", changed);
                   });
                 },
                 {"changed while it was read"});
    EXPECT_FALSE(path_exists(folder / "corpus/manifest.json"));
    write_text(folder / "t.tsv", "a\t0\nb\t1\n");
  }
}

TEST(Tables, SentimentsHaveTwoClasses) {
  TemporaryFolder folder;
  for (const std::string split : {"train", "dev", "test"}) write_sentiments(split, folder / split);
  PrepareOptions options =
      table_options(folder / "corpus", {folder / "train"}, {"sentence", "label"}, "words");
  options.valid_paths = {folder / "dev"};
  options.test_paths = {folder / "test"};
  prepare_corpus(options);
  const Corpus corpus(folder / "corpus");
  verify_corpus(corpus);
  EXPECT_EQ(classes_of(corpus), (std::vector<std::string>{"0", "1"}));
  for (const auto& [split, file] :
       std::map<std::string, std::string>{{"train", "train"}, {"valid", "dev"}, {"test", "test"}}) {
    const std::string table = read_text(folder / file);
    const auto num_lines = std::count(table.begin(), table.end(), '\n');
    const Labels labels = labels_of(corpus, split);
    ASSERT_EQ(static_cast<std::int64_t>(labels.size()), num_lines - 1) << split;
    StreamReader reader(corpus, split, "tokens");
    EXPECT_EQ(reader.documents(), num_lines - 1);
    std::size_t at = table.find('\n') + 1;
    for (const std::int64_t label : labels) {
      const std::size_t end = table.find('\n', at);
      ASSERT_EQ(table[end - 1] - '0', label) << table.substr(at, end - at);
      at = end + 1;
    }
  }
}

}  // namespace
}  // namespace birkhoff
