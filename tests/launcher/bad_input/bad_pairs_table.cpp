// Bad aligned files for `prepare`, and bad options of generated pairs.
#include "tests/launcher/bad_input/bad_input.h"
#include "tests/launcher/bad_input/damage.h"

namespace birkhoff {
namespace {

// prepare with these options of two files with these contents.
BadInput pairs(std::string name, ExitCode code, const std::string& options,
               std::vector<std::string> words, const std::string& sources = "a cat\na dog\n",
               const std::string& targets = "eine Katze\nein Hund\n") {
  return {.name = "pairs " + name,
          .line = "prepare --out new --valid 0 " + options,
          .code = code,
          .words = std::move(words),
          .spoil = [=] {
            write_bytes("a.en", sources);
            write_bytes("a.de", targets);
          }};
}

BadInput usage(std::string name, const std::string& options, std::vector<std::string> words) {
  return pairs(std::move(name), ExitCode::kUsage, options, std::move(words));
}

BadInput data(std::string name, const std::string& sources, const std::string& targets,
              std::vector<std::string> words, const std::string& tokenizer = "words") {
  return pairs(std::move(name), ExitCode::kData, "--tokenizer " + tokenizer + " a.en --target a.de",
               std::move(words), sources, targets);
}

std::vector<BadInput> flags() {
  return {
      usage("without targets of test", "--train a.en --target a.de --test a.en",
            {"--test-target", "0 files of targets for 1 file of sources"}),
      usage("without sources of test", "a.en --target a.de --test-target a.de",
            {"--test-target", "1 file of targets for 0 files of sources"}),
      usage("with too few sources", "a.en --target a.de text/one.txt",
            {"--target", "2 files of targets for 1 file of sources"}),
      usage("of targets alone", "--target a.de", {"PATH is required"}),
      usage("--target without a value", "a.en --target", {"--target"}),
      usage("--targets", "a.en --targets a.de", {"--targets", "did you mean '--target'"}),
      as_process_too(usage("of a missing file", "a.en --target b.de", {"b.de", "No such file"})),
      usage("of a folder", "a.en --target text", {"text", "no regular file"}),
      usage("of one file", "a.en --target a.en", {"a.en", "given twice"}),
      usage("of standard input", "- --target a.de", {"-:", "pairs are read from files"}),
      usage("with --lines", "a.en --target a.de --lines", {"--target", "--lines"}),
      usage("with a table's columns", "a.en --target a.de --text-column 1 --label-column 2",
            {"--target", "--text-column"}),
      usage("with --images", "a.en --target a.de --images", {"--target", "--images"}),
      usage("with another source tokenizer", "a.en --target a.de --source-tokenizer letters",
            {"--source-tokenizer letters", "sentencepiece"}),
      usage("of sources alone", "a.en --source-tokenizer words",
            {"--source-tokenizer", "--target"}),
      usage("--source-tokenizer and --like",
            "a.en --target a.de --source-tokenizer words --like words",
            {"--source-tokenizer", "--like"}),
      usage("like a single document", "a.en --target a.de --like corpus",
            {"--like", "no end mark", "sources and targets"}),
      usage("with an empty name", "'' --target a.de", {"--train", "name of a file is empty"}),
      usage("with --vocab-size for bytes", "a.en --target a.de --vocab-size 400",
            {"--vocab-size 400", "bytes"}),
  };
}

std::vector<BadInput> lines() {
  return {
      as_process_too(data("with fewer targets", "a\nb\nc\n", "x\ny\n",
                          {"a.en:3", "no partner", "a.de ends after 2 lines"})),
      data("with fewer sources", "a\n", "x\ny", {"a.de:2", "no partner", "a.en ends after 1 line"}),
      data("with an empty target", "a\nb\n", "x\n\n", {"a.de:2: the line is blank", "a.en:2"}),
      data("with a blank source", "a\n  \nc\n", "x\ny\nz\n",
           {"a.en:2: the line is blank", "a.de:2"}),
      data("with NUL in a source", std::string("a\nb\0c\n", 6), "x\ny\n",
           {"a.en:2", "byte 1", "NUL"}),
      data("with NUL in a target", "a\nb\n", std::string("x\n\0\n", 4),
           {"a.de:2", "byte 0", "NUL"}),
      data("with bytes that are not UTF-8", "a\nb\n", "x\n\xff\n", {"a.de:2", "not UTF-8"}),
      data("in Latin-1", "caf\xe9\nb\n", "x\ny\n", {"a.en:1", "byte 3", "not UTF-8"}),
      data("in UTF-16",
           std::string("\xff\xfe"
                       "a\0\n\0",
                       6),
           "x\n", {"a.en", "UTF-16"}),
      data("with a long line", "a\n" + std::string((1 << 20) + 1, 'b') + "\n", "x\ny\n",
           {"a.en:2", "longer than 1048576 bytes"}),
      data("that are damaged gzip data", "\x1f\x8b\x08 damaged", "x\n", {"a.en", "gzip"}),
      pairs("of empty files", ExitCode::kUsage, "a.en --target a.de", {"no text", "train"}, "", ""),
      pairs("that are all blank", ExitCode::kUsage, "a.en --target a.de", {"no text", "train"},
            "\n\n", "\n \n"),
  };
}

std::vector<BadInput> generated() {
  const auto bad = [](std::string name, const std::string& options,
                      std::vector<std::string> words) {
    return BadInput{.name = "generated pairs " + name,
                    .line = "prepare --out new " + options,
                    .words = std::move(words)};
  };
  return {
      bad("of another task", "--generate shuffle", {"--generate", "sort"}),
      bad("with an input", "--generate sort text/one.txt", {"text/one.txt", "--generate"}),
      bad("with a tokenizer", "--generate sort --tokenizer words", {"--generate", "--tokenizer"}),
      bad("with targets", "--generate sort --target text/one.txt", {"--generate", "--target"}),
      bad("without symbols", "--generate sort --symbols 0", {"--symbols"}),
      bad("with too many symbols", "--generate sort --symbols 65537", {"--symbols"}),
      bad("without a length", "--generate sort --length 0", {"--length"}),
      bad("without samples", "--generate sort --samples 0", {"--samples"}),
      bad("without --generate", "text/one.txt --symbols 5", {"--symbols", "--generate"}),
  };
}

}  // namespace

std::vector<BadInput> bad_pairs() {
  std::vector<BadInput> rows;
  for (auto some : {flags, lines, generated}) {
    for (BadInput& row : some()) rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace birkhoff
