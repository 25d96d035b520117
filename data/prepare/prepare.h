// The making of a corpus folder from text. A file is a document or holds many of them
// (data/prepare/input/text_source.h), or each row of a table is one, or each two lines of aligned
// files are a pair of them. Each split gets its share of
// the bytes of every input: small documents go to a split whole, larger ones are cut
// (data/prepare/input/split_rule.h). See docs/corpus_format.md.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "data/prepare/input/text_source.h"
#include "data/tokenizers/known_tokenizer.h"

namespace birkhoff {

class ProcessGroup;

// The columns of tables: by name, or by number from 1.
struct TableColumns {
  std::string text, label;
  // The first line of each file names the columns. Always so if a column is given by its name.
  bool header = false;
  std::string second = {};  // the second text of each row; empty: a row has one text
};

struct PrepareOptions {
  std::string out;  // folder to make: missing, empty, or left by an earlier prepare
  // bytes, chars, words or sentencepiece, learned from the text of the train split; or the path of
  // a vocabulary or model (data/tokenizers/known_tokenizer.h).
  std::string tokenizer = "bytes";
  std::optional<TokenizerSource> like;  // used instead of `tokenizer`, including its end mark
  // For pairs: a second tokenizer, for sources; `tokenizer` or `like` is then for targets. If
  // unset, sources and targets share one, which is learned from both.
  std::string source_tokenizer;
  std::optional<TokenizerSource> source_like;
  // Maximum size of the vocabulary, marks included, for words and sentencepiece; 0 = 32000 for
  // words, 8000 for sentencepiece. For any other tokenizer it must be 0.
  std::int64_t vocab_size = 0;
  // Fractions of the bytes of `paths` to hold out. 0 = no such split. valid + test < 1. Not used
  // for a split that has its own paths.
  double valid_fraction = 0.1;
  double test_fraction = 0;
  // Files, folders (walked in sorted order, links not followed), or "-" for standard input. They
  // may not be `out`, lie directly in it, be corpora, or be given twice.
  std::vector<std::string> paths;
  std::vector<std::string> valid_paths, test_paths;  // all of their text goes to that split
  // Pairs (data/prepare/aligned_files.h), if not empty: the files above are files of sources, and
  // these are the files of their targets, as many for each split.
  std::vector<std::string> target_paths, valid_target_paths, test_target_paths;
  TextFormat format;  // how documents lie in the files, if they are neither tables nor pairs
  // If set, the files are tables (data/prepare/table.h): each row is a document, or with a second
  // text one in each of the streams `tokens` and `second`, and the record `label` of each split
  // holds the labels.
  std::optional<TableColumns> table;
  // The classes of the labels 0, 1, ...; if empty, all labels of the input, sorted. Only for
  // tables, and for records (data/prepare/records/prepare_records.h).
  std::vector<std::string> class_names;

  // Maximum number of tokens in a shard. One shard per split is kept in memory.
  std::int64_t shard_tokens = 16 << 20;
  // Bytes of text encoded at a time; longer lines are cut. 0 = 16 KiB for sentencepiece, 64 KiB for
  // a tokenizer from a file or `like`, 1 MiB for the rest.
  std::int64_t chunk_bytes = 0;
  // Memory for the lines that sentencepiece is trained on; 0 = 512 bytes for each id of the
  // vocabulary, at least 4 MiB and at most 16 MiB. Not used for any other tokenizer.
  std::int64_t sample_bytes = 0;

  bool has_pairs() const {
    return !target_paths.empty() || !valid_target_paths.empty() || !test_target_paths.empty();
  }
};

struct PrepareProgress {
  // "read standard input", "read documents", "build vocabulary", "train SentencePiece", "encode",
  // "find images", "read images", and so for other records
  std::string phase;
  std::int64_t done_bytes = 0, total_bytes = 0;  // of this phase; total 0 = unknown
  double bytes_per_second = 0;                   // of this phase
  double elapsed_seconds = 0;                    // since the start of the command
  // Time until the end of the command, if the rest is read as fast as in this phase and training
  // takes no time; negative = unknown.
  double eta_seconds = -1;
};

struct PrepareResult {
  bool already_prepared = false;  // the folder already held this corpus; nothing was done
  std::int64_t empty_files = 0;   // skipped
  std::int64_t not_regular = 0;   // links, devices and sockets in folders, skipped
  // Lines about documents that are not plain text or are in two splits, or about records.
  std::vector<std::string> notes;
};

// Makes the corpus. The manifest is written last: a folder without one is not a corpus, and the
// same command starts over. Memory does not depend on the size of the input, except for the names
// in one folder and the labels of tables, of which there are at most 65,536. `progress` is called
// at most every 0.1 s, and at the end of each phase. Error(kUsage): invalid options or paths, or a
// folder that holds something else, which is not touched. Error(kData): text that the tokenizer
// cannot encode, with file and byte, or a row or pair that cannot be used, with file and line.
// Error(kStorage): the file system failed. The manifest of the corpus holds its statistics.
//
// ranks: if not null, they divide the work; collective over them. The bytes are those of one rank.
// All ranks read all of the text, so Error(kUsage) if a path is a pipe, and Error(kData) if they
// see different files. Rank 0 learns the tokenizer, and the result is rank 0's.
PrepareResult prepare_corpus(const PrepareOptions& options,
                             const std::function<void(const PrepareProgress&)>& progress = {},
                             ProcessGroup* ranks = nullptr);

}  // namespace birkhoff
