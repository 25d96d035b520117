// Generation of token ids from a language model, one at a time.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "models/model.h"

namespace birkhoff {

struct GenerateOptions {
  std::int64_t tokens = 200;  // ids to generate
  double temperature =
      1.0;  // logits are divided by it; 0: always the likeliest id (the smallest of equals)
  std::int64_t top_k = 0;  // sample among the k likeliest ids only; 0: among all
  std::uint64_t seed = 1;  // of the sampling noise: id n depends on (seed, n) and the logits alone
  std::int32_t first = 0;  // what an empty prompt starts with: an end-of-document id
  // A model trained with data.restart_at_documents: what follows this end-of-document id begins in
  // an empty cache, at position 0, as in training. Absent: documents flow into one another.
  std::optional<std::int32_t> restart_after = std::nullopt;
};

// The generated ids, without the prompt. A full cache (Model::max_tokens) is rebuilt from the last
// half window, so that each further id sees between half a window and a whole one. Of a longer
// prompt the last window is read (unread_prompt_ids). Prompt ids are the tokenizer's. Bad options:
// Error(kUsage).
std::vector<std::int32_t> generate(Model& model, const std::vector<std::int32_t>& prompt_ids,
                                   const GenerateOptions& options);

// How many ids at the start of a prompt generate() drops, because the model decodes no more than
// Model::max_tokens() in one go. The caller tells the user if any.
std::int64_t unread_prompt_ids(const Model& model, const std::vector<std::int32_t>& prompt_ids);

}  // namespace birkhoff
