// Text generated from lines: a language model continues them, and a translation model
// translates them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "launcher/decoding/lines_on_ranks.h"
#include "models/model.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/decoding/sequence_search.h"

namespace birkhoff {

class LineGenerator {
 public:
  virtual ~LineGenerator() = default;

  // The ids that the model reads of a line: at least one. Error(kData) with the line's place if it
  // cannot be encoded.
  virtual std::vector<std::int32_t> encode(const TextLine& line) = 0;
  // Whether sources of a batch must have equal lengths.
  virtual bool needs_equal_lengths() const = 0;
  // The sequences for a batch of encoded lines. numbers: of the lines, which key the noise.
  virtual std::vector<FoundSequence> generate(const std::vector<std::vector<std::int32_t>>& sources,
                                              const std::vector<std::uint64_t>& numbers) = 0;
  // A message about lines that encode() has cut to what the model can read; empty: none.
  virtual std::string cut_lines() const = 0;
};

// max_tokens: ids to generate for each line; not set: 200 for a language model, and 50 more than
// the source has for a translation model (T2T's limit). Sequences end at the end mark, if the
// corpus had one. Error(kUsage) if the model generates no text, or fewer than max_tokens ids.
// `model` must outlive the result.
std::unique_ptr<LineGenerator> make_line_generator(const CheckpointFolder& checkpoint,
                                                   const std::string& path, Model& model,
                                                   SearchOptions options,
                                                   std::optional<std::int64_t> max_tokens);

}  // namespace birkhoff
