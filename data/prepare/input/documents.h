// The input of `birkhoff prepare`: finds its documents and reads their text in parts.
#pragma once

#include <sys/stat.h>

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cluster/base/files/file.h"
#include "data/text/packed_text.h"
#include "data/text/text_file.h"

namespace birkhoff {

enum SplitIndex { kTrain = 0, kValid = 1, kTest = 2 };
inline constexpr std::array<SplitIndex, 3> kSplits = {kTrain, kValid, kTest};
inline constexpr const char* kSplitNames[] = {"train", "valid", "test"};

struct InputPath {
  std::string path;           // file or folder, as given; "-": standard input
  std::string source = {};    // the file of sources, if `path` is the file of targets of pairs
  SplitIndex split = kTrain;  // kTrain: fractions of it may be held out for the other splits
  // For a stream that has been read: the path of its copy, if there is one; its name in hashes; and
  // the hash and size of what was read. Else empty and 0.
  std::string copy = {}, name = {}, content_hash = {};
  std::int64_t content_bytes = 0;
};

struct Document {
  std::string path;        // to open
  std::string shown_path;  // for messages
  std::string name;        // relative to the given folder; decides the split
  std::int64_t bytes = 0;
  SplitIndex split = kTrain;  // of its InputPath
  std::int64_t input = 0;     // index in InputScan::input_bytes
  bool is_whole = false;      // goes to one split, however large it is
  // Of a document among many in a file (data/prepare/input/text_source.h, data/prepare/table.h),
  // valid during the visit. The text of any other document is its file.
  std::optional<std::string_view> text = {};
  std::string_view label = "";  // of a row of a table; never null
  // The other text of a pair. Of a target: its source; of the file of targets: that of the sources;
  // of the first text of a row: the second one. Else null.
  const Document* partner = nullptr;
  bool of_pair = false;  // it is the source or the target of a pair
  // The file is compressed: the document is what it holds, and so are `bytes`.
  bool packed = false;
};

// A document among many in a file. Its names are written in place, because there may be millions.
class PartOfFile {
 public:
  explicit PartOfFile(const Document& file);

  // The document with this text, which it refers to, FILE:NUMBER by name and FILE UNIT NUMBER in
  // messages. It is valid until the next call.
  Document& of(std::string_view text, std::string_view unit, std::int64_t number);

 private:
  const std::size_t shown_path_bytes_, name_bytes_;
  Document document_;
};

// The result of a walk over the input. Memory does not depend on the number of files, except for
// the names in one folder (and in the folders above it), which are sorted in memory.
struct InputScan {
  std::int64_t documents = 0, bytes = 0;
  std::array<std::int64_t, 3> documents_of = {};  // by InputPath::split
  // By path, or a single total if there are more than kMaxInputs paths: then a shell has listed the
  // files of a folder.
  std::vector<std::int64_t> input_bytes;
  std::int64_t empty_files = 0;  // skipped
  std::int64_t empty_texts = 0;  // skipped; among many in a file
  std::int64_t not_regular = 0;  // skipped
  std::string hash;              // XXH3-128 over names, sizes and modification times
};
inline constexpr std::size_t kMaxInputs = 100;

enum class EmptyFiles { kSkip, kVisit };

// Of a file, as hashes of inputs have it: "SECONDS.NANOSECONDS".
std::string modification_time(const struct stat& info);

// Counts the documents that files hold.
class DocumentCounts {
 public:
  // Returns false if the document is empty.
  bool add(const Document& document);
  // The scan of the documents, in place of the scan of their files.
  InputScan scan(InputScan files) const;

 private:
  InputScan counted_;
};

// Visits the regular files in order, by default without empty ones: paths as given, folders depth
// first with their names sorted by bytes. Does not follow links in folders, and skips the folder
// `except`. The two files of pairs are one visit. Error(kUsage) names a path that is missing or
// given twice (also if it is a file in a given folder), or a folder that is a corpus.
InputScan for_each_document(const std::vector<InputPath>& paths, const std::string& except,
                            const std::function<void(const Document&)>& visit,
                            EmptyFiles empty = EmptyFiles::kSkip);

// Reads the bytes of a document. A compressed one is read from its beginning on: ascending offsets
// are fast.
class DocumentReader {
 public:
  // `document` must outlive it.
  explicit DocumentReader(const Document& document) : document_(document) {}

  const Document& document() const { return document_; }
  // Error(kData) if the file cannot be read or is shorter than it was.
  void read(char* out, std::size_t num_bytes, std::int64_t offset);

 private:
  const Document& document_;
  std::optional<File> file_;
  std::optional<TextFile> unpacked_;
  std::int64_t at_ = 0;  // the next byte of unpacked_
};

// Reads bytes [begin, end) of a document in parts of at most chunk_bytes, cut after a newline, else
// before a space, else between characters. Error(kData) if the file cannot be read.
void for_each_chunk(DocumentReader& reader, std::int64_t begin, std::int64_t end,
                    std::int64_t chunk_bytes,
                    const std::function<void(std::string_view text, std::int64_t offset)>& visit);

}  // namespace birkhoff
