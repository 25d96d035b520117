// Bad tables for `prepare`, and damage to a corpus made of tables.
#include "configs/schema/corpus_manifest.pb.h"
#include "tests/launcher/bad_input/bad_input.h"
#include "tests/launcher/bad_input/damage.h"

namespace birkhoff {
namespace {

using configs::CorpusManifest;

constexpr char kGood[] = "text\tlabel\na cat\t0\na dog\t1\n";

// prepare with these options of a table with this content.
BadInput table(std::string name, ExitCode code, const std::string& options,
               std::vector<std::string> words, const std::string& content) {
  return {.name = "table " + name,
          .line = "prepare --out new --valid 0 " + options + " t.tsv",
          .code = code,
          .words = std::move(words),
          .spoil = [=] { write_bytes("t.tsv", content); }};
}

BadInput usage(std::string name, const std::string& options, std::vector<std::string> words,
               const std::string& content = kGood) {
  return table(std::move(name), ExitCode::kUsage, options, std::move(words), content);
}

// With columns given by name. `content` follows the good rows.
BadInput data(std::string name, const std::string& content, std::vector<std::string> words) {
  return table(std::move(name), ExitCode::kData, "--text-column text --label-column label",
               std::move(words), kGood + content);
}

std::vector<BadInput> columns() {
  return {
      as_process_too(usage("without --label-column", "--text-column text",
                           {"--text-column", "without --label-column"})),
      usage("without --text-column", "--label-column label",
            {"--label-column", "without --text-column"}),
      usage("--header alone", "--header", {"--header", "--text-column"}),
      usage("--text-column twice", "--text-column 1 --text-column 1 --label-column 2",
            {"--text-column"}),
      {.name = "table --text-column without a value",
       .line = "prepare --out new text --label-column 2 --text-column",
       .words = {"--text-column"}},
      usage("--text-column empty", "--text-column '' --label-column 2", {"--text-column"}),
      usage("--text-columns", "--text-columns text --label-column label",
            {"--text-columns", "did you mean '--text-column'"}),
      usage("with another text column", "--text-column sentence --label-column label",
            {"t.tsv:1", "--text-column 'sentence'", "'text', 'label'", "number"}),
      usage("with another label column", "--text-column text --label-column class",
            {"t.tsv:1", "--label-column 'class'", "'text', 'label'"}),
      usage("with names that are no names", "--text-column text --label-column label",
            {"t.tsv:1", "'a\\x00", "no such column"}, std::string("a\0\x01\xff\n", 5)),
      usage("with a name in two columns", "--text-column text --label-column label",
            {"t.tsv:1", "--text-column 'text'", "twice", "--header"},
            "text\ttext\tlabel\na\tb\t0\n"),
      usage("--text-column 0", "--text-column 0 --label-column 2",
            {"t.tsv:1", "--text-column 0", "from 1 to 2"}),
      usage("--label-column 3", "--text-column 1 --label-column 3",
            {"t.tsv:1", "--label-column 3", "2 columns", "from 1 to 2"}),
      usage("--label-column overflows", "--text-column 1 --label-column 99999999999999999999",
            {"t.tsv:1", "--label-column 99999999999999999999"}),
      usage("with one column for both", "--text-column 2 --label-column label",
            {"t.tsv:1", "'2'", "'label'", "same column"}),
      usage("--second-column alone", "--second-column 1", {"--second-column", "--text-column"}),
      usage("--second-column empty", "--text-column 1 --label-column 2 --second-column ''",
            {"--second-column"}),
      usage("--second-column 3", "--text-column 1 --label-column 2 --second-column 3",
            {"t.tsv:1", "--second-column 3", "from 1 to 2"}),
      usage("with another second column",
            "--text-column text --label-column label --second-column texts",
            {"t.tsv:1", "--second-column 'texts'", "'text', 'label'"}),
      usage("with one column for both texts",
            "--text-column text --label-column label --second-column 1 --header",
            {"t.tsv:1", "'text'", "'1'", "same column"}),
      usage("with one column for text and label",
            "--text-column text --label-column label --second-column label",
            {"t.tsv:1", "--second-column 'label'", "same column"}),
      table("with an empty second text", ExitCode::kData,
            "--text-column 1 --label-column 2 --second-column 3", {"t.tsv:2", "column 3", "empty"},
            "a cat\t0\ta dog\na dog\t1\t\n"),
      table("with a second text that is not UTF-8", ExitCode::kData,
            "--tokenizer words --text-column 1 --label-column 2 --second-column 3",
            {"t.tsv:1", "byte 1 of its text", "UTF-8"}, "a cat\t0\tb\xff\na dog\t1\tc\n"),
      usage("with a second column, images", "--images --second-column 1", {"--second-column"}),
      usage("with only a header", "--text-column text --label-column label", {"no text", "t.tsv"},
            "text\tlabel\n"),
      {.name = "table in two files, one without the column",
       .line = "prepare --out new --text-column text --label-column label --train tables/train.tsv "
               "--valid text/one.txt",
       .words = {"text/one.txt:1", "--text-column 'text'"}},
      {.name = "table into a corpus of text",
       .line = "prepare --out words --tokenizer words --text-column text --label-column label "
               "--train tables/train.tsv",
       .words = {"--out words", "other options"}},
      {.name = "table into a corpus of other columns",
       .line = "prepare --out labels --tokenizer words --text-column 1 --label-column 2 --train "
               "tables/train.tsv --valid 0.2 --test tables/test.tsv",
       .words = {"--out labels", "other options", "text column text"}},
  };
}

std::vector<BadInput> rows_of_tables() {
  std::string many_labels, long_labels;
  for (int i = 2; i <= 65537; ++i) many_labels += "a\t" + std::to_string(i) + "\n";
  for (const char c : {'x', 'y', 'z'}) long_labels += "a\t" + std::string(900'000, c) + "\n";
  BadInput piped = data("from standard input", "", {"standard input:2", "1 column,"});
  piped.line = "prepare --out new --text-column text --label-column label -";
  piped.spoil = [] { write_bytes("t.tsv", "text\tlabel\nno tab\n"); };
  piped.input = "t.tsv";
  return {
      piped,
      as_process_too(data("with a row of one column", "a bird\n",
                          {"t.tsv:4: the line has 1 column, line 1 has 2", "tabs"})),
      data("with a row of three columns", "a\tbird\t1\n", {"t.tsv:4: the line has 3 columns"}),
      data("with an empty line", "\na bird\t1\n", {"t.tsv:4: the line is empty; remove it"}),
      data("with an empty text", "\t1\n", {"t.tsv:4: the text (column 1) is empty"}),
      data("with an empty label", "a bird\t\r\n", {"t.tsv:4: the label (column 2) is empty"}),
      data("with a label in Latin-1", "a bird\tcaf\xe9\n",
           {"t.tsv:4: the label 'caf\\xe9' (column 2)", "UTF-8", "label column?"}),
      data("with an escape sequence as label", "a bird\t\x1b[31m\n",
           {"t.tsv:4: the label '\\x1b[31m'", "control characters"}),
      data("with too many labels", many_labels,
           {"t.tsv:65538: '65536' is different label number 65537", "label column?"}),
      data("with long labels", long_labels,
           {"t.tsv:6: up to here, 5 different labels have 2700002 bytes", "label column?"}),
      data("with a long line", "a bird\t" + std::string(1 << 20, '1') + "\n",
           {"t.tsv:4: the line is longer than 1048576 bytes"}),
      table("of one class", ExitCode::kData, "--text-column 1 --label-column 2",
            {"t.tsv: every row has the label '1'", "label column?"}, "a\t1\nb\t1\n"),
      table("compressed", ExitCode::kData, "--text-column 1 --label-column 2",
            {"t.tsv", "damaged gzip data"}, "\x1f\x8b\x08\tb\n"),
      table("in Latin-1", ExitCode::kData, "--tokenizer chars --text-column 1 --label-column 2",
            {"t.tsv:2: byte 3 of its text is not UTF-8"}, "a\t1\ncaf\xe9\t2\n"),
      table("with a label that a corpus has not", ExitCode::kData,
            "--like labels --text-column text --label-column label",
            {"t.tsv:3: the label 'x'", "--like: 0, 1, 2"}, "text\tlabel\na\t0\nb\tx\n"),
      {.name = "table with a split without a row",
       .line = "prepare --out new --valid 0.1 --text-column text --label-column label t.tsv",
       .words = {"the valid split gets nothing", "2 documents"},
       .spoil = [] { write_bytes("t.tsv", kGood); }},
  };
}

// A corpus with labels.
std::vector<BadInput> labels() {
  const auto damaged = [](std::string name, std::vector<std::string> words,
                          std::function<void()> spoil) {
    return BadInput{.name = "labels " + name,
                    .line = "verify labels",
                    .code = ExitCode::kData,
                    .words = std::move(words),
                    .spoil = std::move(spoil)};
  };
  const std::string file = "labels/train-label-00000.h5";
  const auto record = [](CorpusManifest& manifest) -> CorpusManifest::Record& {
    return *manifest.mutable_split(0)->mutable_record(0);
  };
  const auto edited = [](std::function<void(CorpusManifest&)> edit) {
    return [edit = std::move(edit)] { edit_corpus("labels", edit); };
  };
  return {
      as_process_too(damaged("with a bit flipped", {file, "page 0 of /values"},
                             [=] {
                               std::int64_t at = 0;
                               edit_corpus("labels", [&](CorpusManifest& manifest) {
                                 at = record(manifest).shard(0).values_offset();
                               });
                               flip_bit(file, at + 2);
                             })),
      damaged("without a shard", {file, "No such file"}, [=] { remove_one(file); }),
      damaged("with a shard cut", {file, "the manifest says"}, [=] { truncate_to(file, 100); }),
      damaged("of another split", {file}, [=] { swap_files(file, "labels/test-label-00000.h5"); }),
      damaged("beyond the classes", {"-label-0000", "holds 2, not below the 2 classes"},
              edited([](CorpusManifest& manifest) {
                for (auto& split : *manifest.mutable_split())
                  split.mutable_record(0)->mutable_class_name()->RemoveLast();
              })),
      damaged("of another shape", {"-label-0000", "/values", "different size"},
              edited([](CorpusManifest& manifest) {
                for (auto& split : *manifest.mutable_split()) {
                  split.mutable_record(0)->clear_class_name();
                  split.mutable_record(0)->add_shape(1);
                }
              })),
      damaged("with a class twice", {"labels/manifest.json", "class_name '1' is used twice"},
              edited([=](CorpusManifest& manifest) { record(manifest).set_class_name(0, "1"); })),
      damaged("with a class of control characters", {"labels/manifest.json", "'\\x1b[31m'"},
              edited([=](CorpusManifest& manifest) {
                record(manifest).set_class_name(0, "\x1b[31m");
              })),
      damaged("with other classes in a split",
              {"labels/manifest.json", "record 'label'", "split 'valid'"},
              edited([=](CorpusManifest& manifest) { record(manifest).set_class_name(0, "x"); })),
      damaged("with a row too few", {"labels/manifest.json", "split[0].record[0]"},
              edited([=](CorpusManifest& manifest) {
                record(manifest).set_rows(record(manifest).rows() - 1);
              })),
  };
}

}  // namespace

std::vector<BadInput> bad_tables() {
  std::vector<BadInput> rows;
  for (auto some : {columns, rows_of_tables, labels}) {
    for (BadInput& row : some()) rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace birkhoff
