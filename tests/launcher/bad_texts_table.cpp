// What `prepare` is given: its flags, folders and text.
#include "bad_input.h"
#include "damage.h"

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
      usage("of links alone", "--out new links", {"no text in the input", "1 that are no regular"},
            [] {
              std::filesystem::create_directory("links");
              std::filesystem::create_symlink("../text/one.txt", "links/one.txt");
            }),
      usage("of too little text", "--out new one.txt", {"one.txt", "1 bytes", "split"},
            text("one.txt", "a")),
      usage("of too few files", "--out new --valid 0.3 --test 0.3 text",
            {"2 documents", "--valid 0.3", "--test 0.3"}),
      usage("into a file", "--out good.txtpb text", {"--out good.txtpb", "is a file"}),
      usage("into a folder of other things", "--out text good.txtpb",
            {"--out text", "neither empty nor a corpus"}),
      usage("into the folder of its text", "--out text text", {"text", "lies in --out text"}),
      usage("into the folder of its file", "--out text text/one.txt",
            {"text/one.txt", "lies in --out text"}),
      usage("into a file of the user beside an unfinished corpus", "--out left text",
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
           {"wide.txt", "byte 0", "UTF-8"}, text("wide.txt", "\xff\xfe" + std::string(2000, 'a'))),
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

}  // namespace

std::vector<BadInput> bad_texts() {
  std::vector<BadInput> rows = flags();
  for (BadInput& row : folders_and_text()) rows.push_back(std::move(row));
  return rows;
}

}  // namespace birkhoff
