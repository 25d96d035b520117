// What tests/bench/prepare_speed.py compares `birkhoff prepare` with. Each line of a text is a
// document.
//   prepare_peers write FILE MB      writes MB megabytes of sentences like LM1B's
//   prepare_peers read FILE          reads the lines: the floor
//   prepare_peers encode MODEL FILE  encodes each line by the SentencePiece library
// The last two print bytes, tokens, and the seconds from the first read to the last token: by the
// clock, and of the processor.
#include <fmt/format.h>
#include <sentencepiece_processor.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "data/generate/generated_text.h"

namespace {

using birkhoff::GeneratedText;

int write_text(const std::string& path, std::int64_t megabytes) {
  const GeneratedText text(/*seed=*/1);
  std::ofstream out(path, std::ios::binary);
  std::vector<std::int32_t> ids;
  std::int64_t bytes = 0;
  for (std::int64_t sentence = 0; bytes < megabytes * 1'000'000; ++sentence) {
    ids.clear();
    text.append_sentence(sentence, ids);
    ids.pop_back();  // the end mark
    std::string line;
    for (const std::int32_t id : ids) {
      if (!line.empty()) line += ' ';
      line += id < GeneratedText::kWords ? GeneratedText::word(id) : "<unk>";
    }
    line += '\n';
    out << line;
    bytes += std::ssize(line);
  }
  out.close();
  return out.good() ? 0 : 1;
}

// for_line: returns the number of tokens.
int measure(const std::string& path,
            const std::function<std::int64_t(const std::string&)>& for_line) {
  const auto start = std::chrono::steady_clock::now();
  const std::clock_t processor_start = std::clock();
  std::ifstream in(path, std::ios::binary);
  std::int64_t bytes = 0, tokens = 0;
  for (std::string line; std::getline(in, line);) {
    bytes += std::ssize(line) + 1;
    tokens += for_line(line);
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  fmt::print("{} {} {:.4f} {:.4f}\n", bytes, tokens, seconds.count(),
             static_cast<double>(std::clock() - processor_start) / CLOCKS_PER_SEC);
  return bytes > 0 ? 0 : 1;
}

int encode(const std::string& model, const std::string& path) {
  sentencepiece::SentencePieceProcessor processor;
  if (!processor.Load(model).ok()) return 1;
  std::vector<int> ids;
  return measure(path, [&](const std::string& line) {
    ids.clear();
    if (!processor.Encode(line, &ids).ok()) std::exit(1);
    return std::ssize(ids);
  });
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (argc == 4 && arguments[0] == "write")
    return write_text(arguments[1], std::stoll(arguments[2]));
  if (argc == 3 && arguments[0] == "read")
    return measure(arguments[1], [](const std::string&) { return 0; });
  if (argc == 4 && arguments[0] == "encode") return encode(arguments[1], arguments[2]);
  fmt::print(stderr, "usage: prepare_peers write FILE MB | read FILE | encode MODEL FILE\n");
  return 2;
}
