// Bad input of `prepare`: flags, folders and text.
#include "tests/launcher/bad_input/bad_input.h"
#include "tests/launcher/bad_input/damage.h"

namespace birkhoff {
namespace {

BadInput usage(std::string name, std::string line, std::vector<std::string> words,
               std::function<void()> spoil = {}) {
  return {.name = "prepare " + name,
          .line = "prepare " + line,
          .code = ExitCode::kUsage,
          .words = std::move(words),
          .spoil = std::move(spoil)};
}

BadInput data(std::string name, std::string line, std::vector<std::string> words,
              std::function<void()> spoil = {}) {
  BadInput row = usage(std::move(name), std::move(line), std::move(words), std::move(spoil));
  row.code = ExitCode::kData;
  return row;
}

// Writes a file.
std::function<void()> text(const std::string& path, const std::string& bytes) {
  return [=] { write_bytes(path, bytes); };
}

std::vector<BadInput> flags() {
  return {
      as_process_too(usage("without anything", "", {"required", "birkhoff prepare --help"})),
      usage("without --out", "text", {"--out", "required"}),
      usage("without paths", "--out new", {"PATH", "required"}),
      usage("--out without a folder", "text --out", {"--out"}),
      usage("--out twice", "--out new --out newer text", {"--out"}),
      usage("--out empty", "--out '' text", {"--out"}),
      usage("--tokeniser", "--out new --tokeniser chars text",
            {"--tokeniser", "did you mean '--tokenizer'"}),
      usage("--jsonl with --lines", "--out new --jsonl text --lines text", {"--jsonl", "--lines"}),
      usage("--separator empty", "--out new --separator '' text", {"--separator", "empty"}),
      usage("--lines with a table", "--out new --lines --text-column 1 --label-column 2 text",
            {"--text-column", "--lines"}),
      usage("--vocab-size a word", "--out new --tokenizer words --vocab-size ten text",
            {"--vocab-size", "ten"}),
      usage("--vocab-size 1", "--out new --tokenizer words --vocab-size 1 text",
            {"--vocab-size", "1"}),
      usage("--vocab-size negative", "--out new --tokenizer words --vocab-size -5 text",
            {"--vocab-size", "-5"}),
      usage("--vocab-size with an exponent", "--out new --tokenizer words --vocab-size 1e3 text",
            {"--vocab-size", "1e3"}),
      usage("--vocab-size overflows",
            "--out new --tokenizer words --vocab-size 99999999999999999999 text", {"--vocab-size"}),
      usage("--vocab-size too large for words",
            "--out new --tokenizer words --vocab-size 2000000 text",
            {"--vocab-size 2000000", "1048576", "words"}),
      usage("--vocab-size too small for words", "--out new --tokenizer words --vocab-size 2 text",
            {"--vocab-size 2", "from 3"}),
      usage("--vocab-size too small for sentencepiece",
            "--out new --tokenizer sentencepiece --vocab-size 299 text",
            {"--vocab-size 299", "from 300"}),
      usage("--vocab-size with bytes", "--out new --vocab-size 300 text",
            {"--vocab-size 300", "not bytes"}),
      usage("--vocab-size with chars", "--out new --tokenizer chars --vocab-size 300 text",
            {"--vocab-size 300", "not chars"}),
      usage("--vocab-size beyond the text",
            "--out new --tokenizer sentencepiece --vocab-size 30000 text", {"--vocab-size 30000"}),
      usage("--valid above its range", "--out new --valid 1.5 text", {"--valid", "1.5"}),
      usage("--valid negative", "--out new --valid -0.1 text", {"--valid", "-0.1"}),
      usage("--valid nan", "--out new --valid nan text", {"--valid nan"}),
      usage("--valid in percent", "--out new --valid 10% text", {"--valid", "10%"}),
      usage("--test inf", "--out new --test inf text", {"--test", "inf"}),
      usage("--test twice", "--out new --test 0.1 --test 0.2 text", {"--test"}),
      usage("fractions of all", "--out new --valid 0.5 --test 0.5 text",
            {"--valid 0.5", "--test 0.5", "training"}),
      usage("--tokenizer misspelt", "--out new --tokenizer byte text",
            {"--tokenizer byte", "neither bytes, chars"}),
      usage("--tokenizer empty", "--out new --tokenizer '' text", {"--tokenizer"}),
      data("--tokenizer a text file", "--out new --tokenizer text/one.txt text",
           {"text/one.txt", "SentencePiece model"}),
      data("--tokenizer a folder", "--out new --tokenizer text text", {"text", "folder"}),
      data("--tokenizer a truncated model", "--out new --tokenizer short.model text",
           {"short.model", "SentencePiece model"},
           [] {
             const std::string model = read_bytes("pieces/tokenizer.model");
             write_bytes("short.model", model.substr(0, model.size() / 2));
           }),
      data("--tokenizer an empty model", "--out new --tokenizer empty.model text", {"empty.model"},
           text("empty.model", "")),
  };
}

std::vector<BadInput> folders_and_text() {
  return {
      as_process_too(
          usage("of a missing file", "--out new nowhere.txt", {"nowhere.txt", "No such file"})),
      usage("of an empty path", "--out new ''", {"No such file"}),
      usage("of a dangling link", "--out new link.txt", {"link.txt", "No such file"},
            [] { std::filesystem::create_symlink("nowhere", "link.txt"); }),
      usage("of a path through a file", "--out new good.txtpb/text",
            {"good.txtpb/text", "Not a directory"}),
      usage("of an empty file", "--out new empty.txt", {"no text in the input", "1 empty"},
            text("empty.txt", "")),
      usage("of an empty folder", "--out new empty", {"no text in the input"},
            [] { std::filesystem::create_directory("empty"); }),
      usage("of links alone", "--out new links", {"no text in the input", "1 that are not regular"},
            [] {
              std::filesystem::create_directory("links");
              std::filesystem::create_symlink("../text/one.txt", "links/one.txt");
            }),
      usage("of too little text", "--out new one.txt", {"one.txt", "1 byte of text", "train split"},
            text("one.txt", "a")),
      usage("of too little text in two files", "--out new --valid 0.4 --test 0.4 tiny",
            {"tiny: the train split gets nothing of 2 bytes of text in 2 documents"},
            [] {
              write_bytes("tiny/a", "\xc3");
              write_bytes("tiny/b", "\xa4");
            }),
      usage("into a file", "--out good.txtpb text", {"--out good.txtpb", "is a file"}),
      usage("into a folder of other things", "--out text good.txtpb",
            {"--out text", "neither empty nor a corpus"}),
      usage("into the folder of its text", "--out text text", {"text", "lies in --out text"}),
      usage("into the folder of its file", "--out text text/one.txt",
            {"text/one.txt", "lies in --out text"}),
      usage("into a file of the user next to an unfinished corpus", "--out left text",
            {"--out left", "'train-mytext.txt'"},
            [] {
              write_bytes("left/.unfinished", "process 1 on a host");
              write_bytes("left/train-mytext.txt", "dear");
            }),
      usage("of a corpus", "--out new corpus", {"corpus", "is a corpus, not text"}),
      usage("of a folder that holds a corpus", "--out new in", {"in/corpus", "is a corpus"},
            [] {
              write_bytes("in/one.txt", "text");
              std::filesystem::rename("other", "in/corpus");
            }),
      usage("into a run", "--out run text", {"--out run", "neither empty nor a corpus"}),
      usage("into a corpus with other options", "--out bytes --valid 0.3 text/one.txt",
            {"--out bytes", "other options", "valid 0.2"}),
      usage("into a corpus with another tokenizer", "--out corpus --tokenizer bytes text/one.txt",
            {"--out corpus", "other options"}),
      {.name = "prepare under a file",
       .line = "prepare --out good.txtpb/new text",
       .code = ExitCode::kStorage,
       .words = {"good.txtpb", "File exists"}},
      {.name = "prepare in /proc",
       .line = "prepare --out /proc/birkhoff text",
       .code = ExitCode::kStorage,
       .words = {"mkdir", "/proc/birkhoff"}},
      {.name = "prepare under a device",
       .line = "prepare --out /dev/null/new text",
       .code = ExitCode::kStorage,
       .words = {"/dev/null", "File exists"}},
      {.name = "prepare into a name too long",
       .line = "prepare --out " + std::string(300, 'n') + " text",
       .code = ExitCode::kStorage,
       .words = {"File name too long"}},
      data("of Latin-1 as chars", "--out new --tokenizer chars latin.txt",
           {"latin.txt", "byte 2003", "UTF-8"},
           text("latin.txt", std::string(2000, 'a') + "caf\xe9 olé")),
      data("of Latin-1 as words", "--out new --tokenizer words latin.txt",
           {"latin.txt", "byte 3", "UTF-8", "words"},
           text("latin.txt", "caf\xe9 " + std::string(2000, 'a'))),
      data("of UTF-16 as sentencepiece", "--out new --tokenizer sentencepiece wide.txt",
           {"wide.txt", "byte 0", "iconv -f UTF-16 -t UTF-8 wide.txt | birkhoff ... -"},
           text("wide.txt", "\xff\xfe" + std::string(2000, 'a'))),
      data("of UTF-16 of the other byte order as chars", "--out new --tokenizer chars wide.txt",
           {"wide.txt", "byte 0", "iconv"}, text("wide.txt", "\xfe\xff" + std::string(2000, 'a'))),
      data("of gzip data as words", "--out new --tokenizer words text one.txt.gz",
           {"one.txt.gz", "damaged gzip data", "leave it out"},
           text("one.txt.gz", "\x1f\x8b\x08" + std::string(100, 'a'))),
      data("of zstd data as chars", "--out new --tokenizer chars one.zst",
           {"one.zst", "damaged zstd data"},
           text("one.zst", "\x28\xb5\x2f\xfd" + std::string(100, 'a'))),
      data("of JSON Lines that are not JSON", "--out new --jsonl text a.jsonl",
           {"a.jsonl:2", "byte 1 of the line is not JSON"},
           text("a.jsonl", "{\"text\": \"a\"}\nplain\n")),
      data("of JSON Lines without the field", "--out new --jsonl body a.jsonl",
           {"a.jsonl:1", "no field 'body'"}, text("a.jsonl", "{\"text\": \"a\"}\n")),
      data("of bzip2 data as chars", "--out new --tokenizer chars one.bz2",
           {"one.bz2", "bzip2 data", "bzcat one.bz2 |"},
           text("one.bz2", "BZh91AY&SY" + std::string(100, 'a'))),
      data("of xz data as chars", "--out new --tokenizer chars one.xz",
           {"one.xz", "xz data", "xzcat one.xz |"},
           text("one.xz",
                "\xfd"
                "7zXZ" +
                    std::string(100, 'a'))),
      data("of a zip file as words", "--out new --tokenizer words one.docx",
           {"one.docx", "zip data", "unzip -p one.docx |"},
           text("one.docx", "PK\x03\x04" + std::string(100, 'a'))),
      data("of a cut UTF-8 sequence", "--out new --tokenizer chars cut.txt",
           {"cut.txt", "byte 500", "UTF-8"}, text("cut.txt", std::string(500, 'a') + "\xe2\x82")),
      data("of overlong UTF-8", "--out new --tokenizer chars overlong.txt",
           {"overlong.txt", "byte 400", "UTF-8"},
           text("overlong.txt", std::string(400, 'a') + "\xc0\xaf" + std::string(400, 'b'))),
      data("of surrogates", "--out new --tokenizer chars surrogate.txt",
           {"surrogate.txt", "byte 400", "UTF-8"},
           text("surrogate.txt", std::string(400, 'a') + "\xed\xa0\x80" + std::string(400, 'b'))),
  };
}

// Texts for splits.
std::vector<BadInput> splits() {
  BadInput compressed = data("of gzip data from standard input", "--out new --tokenizer chars -",
                             {"standard input", "damaged gzip data"},
                             text("one.txt.gz", "\x1f\x8b\x08" + std::string(100, 'a')));
  compressed.input = "one.txt.gz";
  return {
      compressed,
      usage("of a file given twice", "--out new text/one.txt text/one.txt",
            {"text/one.txt", "given twice"}),
      usage("of a file and its folder", "--out new text text/one.txt",
            {"text/one.txt", "given twice"}),
      usage("of a file given by two names", "--out new text/one.txt text/../text/one.txt",
            {"text/one.txt", "given twice, also as"}),
      usage("of standard input twice", "--out new - -", {"standard input", "twice"}),
      usage("--valid of what is trained on", "--out new --train text --valid text/two.txt",
            {"text/two.txt", "given twice"}),
      usage("--valid a missing file", "--out new --train text/one.txt --valid nowhere.txt",
            {"--valid nowhere.txt", "neither a fraction", "file or folder"}),
      usage("--test a missing file", "--out new --train text/one.txt --test nowhere.txt",
            {"--test nowhere.txt", "neither a fraction"}),
      usage("--train a missing file", "--out new --train nowhere.txt --valid text/one.txt",
            {"nowhere.txt", "No such file"}),
      usage("--valid texts without --train", "--out new --valid text/one.txt",
            {"--train is required", "--valid"}),
      usage("--valid texts next to PATH", "--out new text/two.txt --valid text/one.txt",
            {"text/two.txt", "--train"}),
      usage("--train next to PATH", "--out new text/two.txt --train text/one.txt",
            {"text/two.txt", "--train"}),
      usage("--train, and PATH after a fraction",
            "--out new --train text/one.txt --valid 0.1 text/two.txt", {"text/two.txt", "--train"}),
      usage("--valid a fraction and texts",
            "--out new --train text/one.txt --valid text/two.txt 0.1",
            {"--valid 0.1", "not both", "./0.1"}),
      usage("--valid two fractions", "--out new --valid 0.1 --valid 0.2 text",
            {"--valid 0.2", "one fraction"}),
      usage("--valid 0.95", "--out new --valid 0.95 text", {"--valid 0.95", "from 0 to 0.9"}),
      usage("--valid a comma", "--out new --valid 0,1 text", {"--valid 0,1", "neither a fraction"}),
      usage("--test without a value", "--out new text --test", {"--test"}),
      usage("--train without a value", "--out new --train", {"--train"}),
      usage("--valid an empty file", "--out new --train text --valid empty.txt",
            {"no text", "valid", "empty.txt", "1 empty file"}, text("empty.txt", "")),
      usage("--test an empty folder", "--out new --train text --test empty",
            {"no text", "test", "empty"}, [] { std::filesystem::create_directory("empty"); }),
      data("--valid of Latin-1", "--out new --tokenizer chars --train text --valid latin.txt",
           {"latin.txt", "byte 3", "UTF-8"}, text("latin.txt", "caf\xe9")),
  };
}

// --like, and --tokenizer with a file.
std::vector<BadInput> known_tokenizers() {
  return {
      usage("--like nothing", "--out new --like nowhere text", {"nowhere", "no such folder"}),
      usage("--like a folder of text", "--out new --like text text", {"text", "neither a corpus"}),
      usage("--like and --tokenizer", "--out new --like run --tokenizer bytes text",
            {"--like", "--tokenizer"}),
      usage("--like and --vocab-size", "--out new --like words --vocab-size 100 text",
            {"--vocab-size 100", "not --like"}),
      usage("--like a run into its corpus", "--out corpus --like run text/one.txt",
            {"--out corpus", "other options"}),
      {.name = "prepare --like a run without a checkpoint",
       .line = "prepare --out new --like empty text",
       .code = ExitCode::kCheckpoint,
       .words = {"empty", "no checkpoint yet"},
       .spoil = [] { std::filesystem::create_directories("empty/checkpoints"); }},
      data("--like a corpus without its vocabulary", "--out new --like words text",
           {"tokenizer.words"}, [] { remove_one("words/tokenizer.words"); }),
      data("--like a corpus with another vocabulary", "--out new --like corpus text",
           {"tokenizer.chars", "hash"}, [] { append_bytes("corpus/tokenizer.chars", "ffff\n"); }),
      data("of characters that the model has not", "--out new --like run capitals.txt",
           {"capitals.txt", "character 'C'", "U+0043", "byte 8"},
           text("capitals.txt", "small a CAPITAL")),
      data("of characters that a vocabulary has not",
           "--out new --tokenizer corpus/tokenizer.chars capitals.txt",
           {"capitals.txt", "character 'C'"}, text("capitals.txt", "CAPITALS")),
      data("--tokenizer a corpus", "--out new --tokenizer corpus text",
           {"--tokenizer corpus", "folder", "--like corpus"}),
      data("--tokenizer a vocabulary cut in a line", "--out new --tokenizer short.chars text",
           {"short.chars", "no end"},
           [] {
             const std::string chars = read_bytes("corpus/tokenizer.chars");
             write_bytes("short.chars", chars.substr(0, chars.size() - 1));
           }),
      data("--tokenizer a vocabulary of a later version", "--out new --tokenizer later.words text",
           {"later.words:1", "not a vocabulary"}, text("later.words", "birkhoff words 2\nthe\n")),
      data("--tokenizer a vocabulary with a word twice", "--out new --tokenizer twice.words text",
           {"twice.words", "twice"}, text("twice.words", "birkhoff words 1\nthe\nthe\n")),
  };
}

}  // namespace

std::vector<BadInput> bad_texts() {
  std::vector<BadInput> rows;
  for (auto table : {flags, folders_and_text, splits, known_tokenizers}) {
    for (BadInput& row : table()) rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace birkhoff
