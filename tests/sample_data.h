// Data sets for tests: small generated ones of the same form as the real ones, flaws included, or
// the real ones from BIRKHOFF_DATA, the folder with tinyshakespeare.txt.gz and sst2.*.tsv.gz.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace birkhoff {

// The path of a file of real data; not set: BIRKHOFF_DATA is not set, or lacks the file.
inline std::optional<std::string> real_data(const std::string& name) {
  const char* data = std::getenv("BIRKHOFF_DATA");
  if (data == nullptr) return std::nullopt;
  std::string path = std::string(data) + "/" + name;
  if (!std::filesystem::exists(path)) return std::nullopt;
  return path;
}

// Unpacks the real data set to `path`; false: there is none.
inline bool write_real_data(const std::string& name, const std::string& path) {
  const std::optional<std::string> packed = real_data(name + ".gz");
  if (!packed) return false;
  const std::string command = "gzip -dc '" + *packed + "' > '" + path + "'";
  // NOLINTNEXTLINE(bugprone-command-processor): the name of the test's own file
  if (std::system(command.c_str()) != 0) throw std::runtime_error(command);
  return true;
}

// Plays, of 65 different characters: speakers, speeches and empty lines.
inline void write_plays(const std::string& path) {
  if (write_real_data("tinyshakespeare.txt", path)) return;
  static const std::string kCharacters =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!$&',-.3:;?";  // with space and newline: 65
  std::mt19937 random(1);
  std::ofstream out(path, std::ios::binary);
  for (int speech = 0; speech < 400; ++speech) {
    out << (speech % 2 == 0 ? "First Citizen:\n" : "MENENIUS:\n");
    for (std::size_t i = 0; i < 40 + random() % 80; ++i) {
      out << kCharacters[random() % kCharacters.size()] << (random() % 5 == 0 ? " " : "")
          << (random() % 40 == 0 ? "\n" : "");
    }
    out << "\n\n";
  }
}

struct SentimentRows {
  int train = 4000, dev = 500, test = 200;
};

// A split of SST-2, "train", "dev" or "test": a header, then a phrase with a space at its end and
// its class, 0 or 1. Phrases occur more than once, also in several splits; some are a single word
// or mark, some are not ASCII.
inline void write_sentiments(const std::string& split, const std::string& path) {
  if (write_real_data("sst2." + split + ".tsv", path)) return;
  static const std::vector<std::string> kWords[] = {
      {"dull", "flaws", "clich\xc3\xa9s", "lifeless", "mess"},
      {"charming", "moving", "na\xc3\xafvely", "delight", "best"}};
  static const std::vector<std::string> kOthers = {"the", "of", "film", "--",  ",",
                                                   "'s",  "a",  "it",   "and", "b\xc3\xbcttner"};
  const SentimentRows rows;
  std::mt19937 random(split == "train" ? 1 : split == "dev" ? 2 : 3);
  std::ofstream out(path, std::ios::binary);
  out << "sentence\tlabel\n";
  for (int row = 0; row < (split == "train" ? rows.train
                           : split == "dev" ? rows.dev
                                            : rows.test);
       ++row) {
    const unsigned label = random() % 20 < 9 ? 0 : 1;
    const std::size_t length = random() % 12;
    for (std::size_t i = 0; i < length; ++i) out << kOthers[random() % kOthers.size()] << ' ';
    out << kWords[label][random() % kWords[label].size()] << " \t" << label << '\n';
  }
}

}  // namespace birkhoff
