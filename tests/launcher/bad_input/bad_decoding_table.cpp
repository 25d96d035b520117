// Bad input of `generate`, `score`, `bleu`, `average` and `export`.
#include "tests/launcher/bad_input/bad_input.h"
#include "tests/launcher/bad_input/damage.h"

namespace birkhoff {
namespace {

BadInput row(std::string line, ExitCode code, std::vector<std::string> words,
             std::function<void()> spoil = {}) {
  return {.name = line,
          .line = line,
          .code = code,
          .words = std::move(words),
          .spoil = std::move(spoil)};
}

BadInput usage(std::string line, std::vector<std::string> words, std::function<void()> spoil = {}) {
  return row(std::move(line), ExitCode::kUsage, std::move(words), std::move(spoil));
}

// Of a command that reads the file `lines`.
BadInput lines(std::string name, std::string line, const std::string& content,
               std::vector<std::string> words) {
  BadInput data = row(std::move(line), ExitCode::kData, std::move(words),
                      [=] { write_bytes("lines", content); });
  data.name += " of " + name;
  return data;
}

std::vector<BadInput> of_generate() {
  const std::string line = "generate run --input lines";
  return {
      as_process_too(usage("generate", {"PATH", "required"})),
      usage("generate nowhere", {"nowhere", "no such folder"}),
      usage("generate labels", {"labels", "corpus"}),
      usage("generate run --input nowhere", {"nowhere", "No such file"}),
      usage("generate run --input text", {"text", "folder"}),
      usage("generate run --beam 0", {"--beam", "0"}),
      usage("generate run --beam 2.5", {"--beam", "2.5"}),
      usage("generate run --length-penalty -1", {"--length-penalty", "-1"}),
      usage("generate run --length-penalty nan", {"length penalty", "nan"}),
      usage("generate run --length-offset -5", {"--length-offset", "-5"}),
      usage("generate run --temperature -1", {"--temperature", "-1"}),
      usage("generate run --temperature 1 --beam 4", {"--temperature", "--beam"}),
      usage("generate run --top-k 5", {"--top-k", "--temperature"}),
      usage("generate run --temperature 1 --top-p 0", {"top-p", "0"}),
      usage("generate run --seed 3", {"--seed", "--temperature"}),
      usage("generate run --max-tokens 0", {"--max-tokens", "0"}),
      usage("generate run --input text/one.txt --max-tokens 33", {"--max-tokens 33", "32 tokens"}),
      usage("generate run --batch 0", {"--batch", "0"}),
      usage("generate run --ranks 0", {"--ranks", "0"}),
      as_process(usage("generate run --ranks 2", {"--input -", "--ranks"})),
      row("generate run --input text/one.txt --out nowhere/texts", ExitCode::kStorage,
          {"nowhere/texts"}),
      lines("bytes", line, "good\nb\xff\n", {"lines:2", "byte 1", "UTF-8"}),
      lines("a long line", line, std::string((1 << 20) + 1, 'a') + "\n", {"lines:1", "1048576"}),
  };
}

std::vector<BadInput> of_score() {
  const std::string line = "score run --input lines";
  return {
      usage("score", {"PATH", "required"}),
      usage("score corpus", {"corpus"}),
      usage("score run --input nowhere", {"nowhere", "No such file"}),
      as_process(usage("score run --ranks 2", {"--input -", "--ranks"})),
      lines("plain text", line, "to be or not\n", {"lines:1", "JSON object", "continuation"}),
      lines("an array", line, "[\"a\"]\n", {"lines:1", "JSON object"}),
      lines("an empty line", line, "{\"text\": \"good\"}\n\n", {"lines:2", "JSON object"}),
      lines("neither field", line, "{\"context\": \"a\"}\n", {"lines:1", "\"continuation\""}),
      lines("both fields", line, "{\"text\": \"a\", \"continuation\": \"b\"}\n",
            {"lines:1", "either"}),
      lines("a number", line, "{\"text\": 7}\n", {"lines:1", "\"text\"", "not a text"}),
      lines("a context of a text", line, "{\"text\": \"a\", \"context\": \"b\"}\n",
            {"lines:1", "\"context\""}),
      lines("an empty text", line, "{\"text\": \"\"}\n", {"lines:1", "no token to predict"}),
      lines("an empty continuation", line, "{\"context\": \"a\", \"continuation\": \"\"}\n",
            {"lines:1", "no token to predict"}),
      lines("bytes", line, "{\"text\": \"b\xff\"}\n", {"lines:1", "JSON object"}),
  };
}

std::vector<BadInput> of_bleu() {
  return {
      usage("bleu text/one.txt", {"REFERENCES", "required"}),
      usage("bleu nowhere text/one.txt", {"nowhere", "No such file"}),
      usage("bleu text/one.txt text/one.txt --tokenize 13b", {"--tokenize", "13b"}),
      lines("fewer lines", "bleu lines text/one.txt", "one\n",
            {"lines ends after 1 line, and text/one.txt continues"}),
      lines("more lines", "bleu text/one.txt lines", "one\n",
            {"lines ends after 1 line, and text/one.txt continues"}),
      lines("bytes", "bleu lines lines", "one\n\xfe\n", {"lines:2", "UTF-8"}),
      lines("nothing", "bleu lines lines", "", {"lines", "no lines"}),
  };
}

std::vector<BadInput> of_average() {
  return {
      usage("average run", {"--out", "required"}),
      usage("average run --out mean --last 3", {"--last 3", "2 checkpoints", "checkpoint.keep"}),
      usage("average run --out mean --last 1", {"--last", "1"}),
      usage("average corpus --out mean", {"corpus", "no run folder"}),
      usage("average run/checkpoints/step-00000004 --out mean --last 2", {"no run folder"}),
      usage("average run --last 2 --out text", {"--out text", "not an empty folder"}),
      row("average run --last 2 --out mean", ExitCode::kCheckpoint, {"step-00000002"},
          [] { flip_bit(checkpoint_file("run/checkpoints/step-00000002", "model-"), 2000); }),
  };
}

std::vector<BadInput> of_export() {
  return {
      usage("export run", {"--out", "required"}),
      usage("export corpus --out weights", {"corpus"}),
      usage("export nowhere --out weights", {"nowhere"}),
      usage("export run --out text", {"--out text", "not an empty folder"}),
      row("export run/checkpoints/step-00000004 --out weights", ExitCode::kCheckpoint,
          {"step-00000004"},
          [] { flip_bit(checkpoint_file("run/checkpoints/step-00000004", "model-"), 2000); }),
  };
}

}  // namespace

std::vector<BadInput> bad_decoding() {
  std::vector<BadInput> rows;
  for (const auto& part : {of_generate(), of_score(), of_bleu(), of_average(), of_export()})
    rows.insert(rows.end(), part.begin(), part.end());
  return rows;
}

}  // namespace birkhoff
