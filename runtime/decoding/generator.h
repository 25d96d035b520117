// Generates token ids from a language model, one at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "models/decoder.h"
#include "runtime/decoding/sampling.h"

namespace birkhoff {

struct GenerateOptions {
  std::int64_t tokens = 200;  // ids to generate
  Sampling sampling = {};
  std::uint64_t text = 0;  // number of the text, when one prompt gets several continuations
  // The end mark of documents. An empty prompt begins with it, and a text ends before it. Absent: a
  // text has all `tokens` ids.
  std::optional<std::int32_t> end_mark = std::nullopt;
  // For a model trained with data.restart_at_documents: what follows an end mark begins with an
  // empty cache at position 0, as in training.
  bool restarts = false;
};

// Invalid options: Error(kUsage), which names the option.
void check_options(const GenerateOptions& options);

// Returns the generated ids, without the prompt and an end mark; calls `take` with each id as
// soon as it is drawn. An empty prompt needs options.end_mark. A full cache (Decoder::max_tokens)
// is rebuilt from the last half window, so each further id sees between half a window and a whole
// one. Of a longer prompt only the last window is read (unread_prompt_ids). Prompt ids are the
// tokenizer's. Invalid options: Error(kUsage).
std::vector<std::int32_t> generate(
    Decoder& model, const std::vector<std::int32_t>& prompt_ids, const GenerateOptions& options,
    const std::function<void(std::int32_t)>& take = [](std::int32_t) {});

// Number of ids that generate() drops from the start of a prompt, because the model decodes at most
// Decoder::max_tokens() in one go. The caller warns the user if there are any.
std::int64_t unread_prompt_ids(const Decoder& model, const std::vector<std::int32_t>& prompt_ids);

}  // namespace birkhoff
