// Corpora of generated rows as large as published data sets, to measure with: `birkhoff bench
// corpus`. Every shard is a function of the seed, so threads make shards of their own, and their
// number does not change a byte.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "data/prepare/prepare.h"

namespace birkhoff {

// The data sets whose sizes and statistics can be had: imagenet64
// (data/generate/generated_images.h), lm1b (data/generate/generated_text.h).
const std::vector<std::string>& generated_names();

struct GenerationOptions {
  std::string out;   // folder to make, as for prepare_corpus()
  std::string name;  // of generated_names()
  double scale = 1;  // share of the rows of the published data set
  std::uint64_t seed = 1;
  int threads = 0;  // 0: as many as there are cores

  std::int64_t shard_tokens = 16 << 20;
  std::int64_t shard_images = 0;  // 0: as many as shard_format::shard_rows() says
};

// Makes the corpus; returns false if the folder already held it. Memory: about 200 MB a thread.
// Errors as prepare_corpus().
bool generate_corpus(const GenerationOptions& options,
                     const std::function<void(const PrepareProgress&)>& progress = {});

}  // namespace birkhoff
