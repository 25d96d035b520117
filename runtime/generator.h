// Generation of token ids from a language model, one at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "models/model.h"

namespace birkhoff {

struct GenerateOptions {
  std::int64_t tokens = 200;  // ids to generate
  double temperature =
      1.0;  // logits are divided by it; 0: always the likeliest id (the smallest of equals)
  std::int64_t top_k = 0;  // sample among the k likeliest ids only; 0: among all
  // Of those, sample among the fewest likeliest ids whose probabilities, at this temperature, add
  // up to top_p or more (Holtzman et al. 2020); in (0, 1], 1: among all.
  double top_p = 1.0;
  // Of the sampling noise: id n depends on (seed, text, n) and the logits alone.
  std::uint64_t seed = 1;
  std::uint64_t text = 0;  // number of the text, where several continue one prompt
  std::int32_t first = 0;  // what an empty prompt starts with: an end-of-document id
  // A model trained with data.restart_at_documents: what follows this end-of-document id begins in
  // an empty cache, at position 0, as in training. Absent: documents flow into one another.
  std::optional<std::int32_t> restart_after = std::nullopt;
};

// Bad options: Error(kUsage), which names the one.
void check_options(const GenerateOptions& options);

// The generated ids, without the prompt; calls `take` with each as soon as it is drawn. A full
// cache (Model::max_tokens) is rebuilt from the last half window, so that each further id sees
// between half a window and a whole one. Of a longer prompt the last window is read
// (unread_prompt_ids). Prompt ids are the tokenizer's. Bad options: Error(kUsage).
std::vector<std::int32_t> generate(
    Model& model, const std::vector<std::int32_t>& prompt_ids, const GenerateOptions& options,
    const std::function<void(std::int32_t)>& take = [](std::int32_t) {});

// How many ids at the start of a prompt generate() drops, because the model decodes no more than
// Model::max_tokens() in one go. The caller tells the user if any.
std::int64_t unread_prompt_ids(const Model& model, const std::vector<std::int32_t>& prompt_ids);

}  // namespace birkhoff
