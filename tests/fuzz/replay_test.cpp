// Runs the fuzz targets over their seeds, and over seeds with a few damaged bytes, with any
// compiler, so that a crash that libFuzzer once found stays fixed. BIRKHOFF_FUZZ_DAMAGES: the
// number of damaged copies for each target, 300 by default.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>
#include <vector>

#include "tests/fuzz/fuzz_targets.h"
#include "tests/processor_time.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;

struct Target {
  const char* name;
  void (*run)(std::string_view);
};
void PrintTo(const Target& target, std::ostream* out) { *out << target.name; }

class Fuzz : public testing::TestWithParam<Target> {
 protected:
  // (name, content) of each seed, sorted by name.
  static std::vector<std::pair<std::string, std::string>> seeds() {
    std::vector<std::pair<std::string, std::string>> seeds;
    for (const auto& entry : fs::directory_iterator(fs::path(BIRKHOFF_SOURCE_DIR) /
                                                    "tests/fuzz/seeds" / GetParam().name)) {
      std::ifstream in(entry.path(), std::ios::binary);
      std::ostringstream bytes;
      bytes << in.rdbuf();
      seeds.emplace_back(entry.path().filename(), bytes.str());
    }
    std::sort(seeds.begin(), seeds.end());
    return seeds;
  }

  // Returns false and adds a failure if the target breaks a promise or takes too long.
  static bool survives(const std::string& what, const std::string& input) {
    const double start = processor_seconds();
    try {
      GetParam().run(input);
    } catch (const std::exception& error) {
      ADD_FAILURE() << what << ": " << error.what();
      return false;
    }
    const double seconds = processor_seconds() - start;
    EXPECT_LT(seconds, kMaxSeconds) << what;
    return seconds < kMaxSeconds;
  }
};

INSTANTIATE_TEST_SUITE_P(
    Targets, Fuzz,
    testing::Values(Target{"config_text", fuzz_config_text},
                    Target{"corpus_manifest", fuzz_corpus_manifest},
                    Target{"checkpoint_manifest", fuzz_checkpoint_manifest},
                    Target{"safetensors", fuzz_safetensors}, Target{"shard", fuzz_shard},
                    Target{"tokenizer", fuzz_tokenizer}, Target{"png", fuzz_png},
                    Target{"jpeg", fuzz_jpeg}, Target{"idx", fuzz_idx}, Target{"cifar", fuzz_cifar},
                    Target{"npz", fuzz_npz}, Target{"modelnet", fuzz_modelnet}),
    [](const auto& target) { return std::string(target.param.name); });

TEST_P(Fuzz, SeedsAndDamagedSeeds) {
  const auto all = seeds();
  ASSERT_GE(all.size(), 4u);
  int tried = 0, survived = 0;
  for (const auto& [name, bytes] : all) {
    ++tried;
    survived += survives(name, bytes);
  }
  const char* told = std::getenv("BIRKHOFF_FUZZ_DAMAGES");
  const int num_damaged = told == nullptr ? 300 : std::atoi(told);
  std::mt19937_64 random(5);
  for (int i = 0; i < num_damaged; ++i) {
    std::string bytes = all[random() % all.size()].second;
    for (std::uint64_t n = 1 + random() % 4; n > 0; --n) {
      const std::size_t at = random() % (bytes.size() + 1);
      const std::size_t length = std::min<std::size_t>(random() % 9, bytes.size() - at);
      switch (random() % 4) {
        case 0:
          bytes.erase(at, length);
          break;
        case 1:
          bytes.insert(at, 1, static_cast<char>(random()));
          break;
        case 2:
          bytes.insert(at, bytes.substr(random() % (bytes.size() + 1), 1 + random() % 40));
          break;
        default:
          if (at < bytes.size()) bytes[at] ^= static_cast<char>(1 << random() % 8);
      }
    }
    ++tried;
    survived += survives("damaged seed " + std::to_string(i), bytes);
  }
  std::printf("%s: tried %d, survived %d, lost %d\n", GetParam().name, tried, survived,
              tried - survived);
}

}  // namespace
}  // namespace birkhoff
