// The good input that rows of the table spoil.
#pragma once

#include <filesystem>
#include <string>

namespace birkhoff {

inline constexpr char kGoodConfig[] = R"(task { language_model {} }
data { corpus: "corpus" sequence_length: 32 }
model {
  layers: 1
  channels: 16
  heads: 2
  attention { group { mechanism { sinkhorn { block: 8 } } } }
}
train {
  steps: 4
  global_batch: 4
  schedule { warmup_steps: 1 }
}
checkpoint { every: 2 }
evaluate { every: 0 }
metrics { every: 1 }
)";

// About `bytes` bytes: lines of words from a small vocabulary, the same for the same seed.
std::string some_text(int bytes, unsigned seed);

// Fills an empty folder with what bad_input.h lists. Starts the program once, to train.
void make_good_input(const std::filesystem::path& folder);

}  // namespace birkhoff
