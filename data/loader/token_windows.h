// Windows of a stream of tokens: the samples of language models. Sample i of T tokens is tokens
// [iT, iT + T] of the stream (with a stride s, [is, is + T]); the last one is only a target.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "data/corpus/corpus.h"
#include "data/loader/sample_source.h"

namespace birkhoff {

struct WindowOptions {
  std::string split = "train";
  std::string stream = "tokens";
  std::int64_t sequence_length = 0;   // T
  bool restart_at_documents = false;  // also return segments_BT and positions_BT
  // Training: epochs after the first cut the stream at other offsets, keyed by `seed`.
  bool shift_windows = false;
  std::uint64_t seed = 0;
  // Training: the number of equal parts into which the split is cut. Sample l W + w is window w of
  // part l, of W windows each; tokens are left over at the end. 0: one part.
  std::int64_t lanes = 0;
  // Evaluation: tokens from the start of a window to that of the next, at most T; 0: T. Of each
  // window but the first, only the last `stride` tokens are targets.
  std::int64_t stride = 0;
  bool with_documents = false;  // also return documents_BT; of evaluation windows only

  std::int64_t step() const { return stride > 0 ? stride : sequence_length; }
};

// The whole windows of a split, for training. If the last window of a shifted epoch would pass the
// end of the stream, it starts earlier. Error(kData) if there are none.
std::unique_ptr<SampleSource> training_windows(const Corpus& corpus, const WindowOptions& options);

// The windows of a split for evaluation: together they hold every target once, in the order of the
// stream. The last window is padded (mask 0). Error(kData) if the split has no target.
std::unique_ptr<SampleSource> evaluation_windows(const Corpus& corpus,
                                                 const WindowOptions& options);

// The number of samples of training_windows(), without reading anything. Errors as there.
std::int64_t num_training_windows(const Corpus& corpus, const WindowOptions& options);

}  // namespace birkhoff
