// Text to a corpus folder. A file is a document; each split gets its share of the bytes of every
// input, by whole documents where they are small, else by cutting them (data/prepare/split_rule.h).
// docs/corpus_format.md.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "data/tokenizers/known_tokenizer.h"

namespace birkhoff {

struct PrepareOptions {
  std::string out;  // folder to make; missing, empty, or left by a prepare
  // bytes, chars, words, sentencepiece: learnt from the text of the train split; or the path of a
  // vocabulary or model (data/tokenizers/known_tokenizer.h).
  std::string tokenizer = "bytes";
  std::optional<TokenizerSource> like;  // used instead of `tokenizer`, the end mark included
  // Most ids of the vocabulary, marks included, for words and sentencepiece; 0 = 32000 for words,
  // 8000 for sentencepiece. Any other tokenizer: must be 0.
  std::int64_t vocab_size = 0;
  // Of the bytes of `paths`, held out. 0 = no such split. valid + test < 1. Not used for a split
  // that has paths of its own.
  double valid_fraction = 0.1;
  double test_fraction = 0;
  // Files, folders (walked in sorted order, links not followed), or "-": stdin. Neither `out` nor
  // what lies directly in it; no corpora; none twice.
  std::vector<std::string> paths;
  std::vector<std::string> valid_paths, test_paths;  // that split, whole

  std::int64_t shard_tokens =
      16 << 20;  // tokens a shard holds at most; one shard a split is kept in memory
  // Text that is encoded at a time; longer lines are cut. 0 = 16 KiB for sentencepiece, 64 KiB for
  // a model's file, 1 MiB for the others.
  std::int64_t chunk_bytes = 0;
  // Memory for the lines that sentencepiece is trained on; 0 = 512 for each id of the vocabulary,
  // at least 4 MiB and at most 16 MiB. Any other tokenizer: not used.
  std::int64_t sample_bytes = 0;
};

struct PrepareProgress {
  std::string phase;  // "read standard input", "build vocabulary", "train SentencePiece", "encode"
  std::int64_t done_bytes = 0, total_bytes = 0;  // of this phase; total 0 = not known
  double elapsed_seconds = 0;                    // since the start of the command
  // Until the end of the command, if what is left to read goes as fast as this phase and training
  // takes no time; negative = not known.
  double eta_seconds = -1;
};

struct PrepareResult {
  bool already_prepared = false;   // the folder held this very corpus: nothing was done
  std::int64_t empty_files = 0;    // skipped
  std::int64_t not_regular = 0;    // links, devices, sockets met in folders, skipped
  std::vector<std::string> notes;  // lines about documents that are not plain text
};

// Makes the corpus, the manifest last: a folder without one is not a corpus, and the same command
// starts over. Memory does not depend on the size of the input, apart from the names of one folder.
// `progress` is called at most every 0.1 s and at the end of each phase. Errors: Error(kUsage)
// options, paths or a folder that holds something else, of which nothing is touched; Error(kData)
// text that the tokenizer cannot take, with file and byte; Error(kStorage) from the file system.
// Figures are in the corpus' manifest.
PrepareResult prepare_corpus(const PrepareOptions& options,
                             const std::function<void(const PrepareProgress&)>& progress = {});

}  // namespace birkhoff
