#include "tests/launcher/bad_input/good_input.h"

#include <algorithm>
#include <random>
#include <stdexcept>

#include "data/prepare/prepare.h"
#include "tests/launcher/bad_input/damage.h"
#include "tests/launcher/child.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;

void prepare(const std::string& out, const std::string& tokenizer, const std::string& text,
             double test = 0.1) {
  PrepareOptions options;
  options.out = out;
  options.tokenizer = tokenizer;
  if (tokenizer == "sentencepiece") options.vocab_size = 320;
  options.valid_fraction = 0.2;
  options.test_fraction = test;
  options.paths = {text};
  options.shard_tokens = 1024;
  prepare_corpus(options);
}

// Rows of a text and one of three labels, under a header.
std::string some_table(int num_rows, unsigned seed) {
  std::mt19937 random(seed);
  std::string table = "text\tlabel\n";
  for (int i = 0; i < num_rows; ++i) {
    std::string text = some_text(20 + static_cast<int>(random() % 60), random());
    std::replace(text.begin(), text.end(), '\n', ' ');
    table += text + "\t" + std::to_string(i % 3) + "\n";
  }
  return table;
}

void prepare_tables() {
  PrepareOptions options;
  options.out = "labels";
  options.tokenizer = "words";
  options.table = TableColumns{"text", "label"};
  options.valid_fraction = 0.2;
  options.paths = {"tables/train.tsv"};
  options.test_paths = {"tables/test.tsv"};
  options.shard_tokens = 12;
  prepare_corpus(options);
}

}  // namespace

std::string some_text(int bytes, unsigned seed) {
  static const char* const kWords[] = {
      "block", "sorts", "every", "query", "and",   "a",   "doubly", "stochastic", "matrix", "of",
      "zebra", "waltz", "jumps", "vex",   "quick", "fog", "the",    "rank",       "keeps",  "its"};
  std::mt19937 random(seed);
  std::string text;
  while (static_cast<int>(text.size()) < bytes) {
    text += kWords[random() % std::size(kWords)];
    text += random() % 8 == 0 ? ".\n" : " ";
  }
  return text;
}

void make_good_input(const fs::path& folder) {
  const fs::path before = fs::current_path();
  fs::current_path(folder);
  write_bytes("good.txtpb", kGoodConfig);
  write_bytes("text/one.txt", some_text(8000, 1));
  write_bytes("text/two.txt", some_text(8000, 2));
  prepare("corpus", "chars", "text/one.txt");
  prepare("bytes", "bytes", "text/one.txt", 0);
  prepare("words", "words", "text/one.txt");
  prepare("pieces", "sentencepiece", "text/one.txt");
  prepare("other", "chars", "text/two.txt");
  write_bytes("tables/train.tsv", some_table(40, 3));
  write_bytes("tables/test.tsv", some_table(10, 4));
  prepare_tables();
  const Finished trained =
      run_child({.line = birkhoff_line({"train", "good.txtpb", "--run", "run"})});
  if (trained.code != 0) throw std::runtime_error("the good run failed: " + trained.err);
  fs::current_path(before);
}

}  // namespace birkhoff
