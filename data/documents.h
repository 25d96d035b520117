// The input of `birkhoff prepare`: which documents there are, which split each goes to, and their
// text piece by piece.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace birkhoff {

struct Document {
  std::string path;  // to open
  std::string name;  // relative to the folder that was given; decides the split
  std::int64_t bytes = 0;
};

// What walking the input tells. Memory does not depend on the number of files, apart from the names
// of one folder, which are sorted in memory (with those of the folders above it).
struct InputScan {
  std::int64_t documents = 0, bytes = 0;
  std::int64_t empty_files = 0;     // skipped
  std::int64_t not_regular = 0;     // skipped
  std::string hash;                 // XXH3-128 over names, sizes and modification times
  std::vector<std::uint64_t> keys;  // document_key of each, while there are at most kMaxRanked
};
inline constexpr std::size_t kMaxRanked = 1000;

// Place of a document in [0, 2^64), from its name alone.
std::uint64_t document_key(std::string_view name);

struct InputPath {
  std::string path;  // file or folder
  // Of a stream that was read already, whose copy at `path`, if there is one, has neither a name
  // nor a modification time that says anything. Else empty and 0.
  std::string name = {}, content_hash = {};
  std::int64_t content_bytes = 0;
};

// Visits the non-empty regular files in order: paths as given, folders depth first with their names
// sorted by bytes, links in folders not followed, the folder `except` left out. Error(kUsage) names
// a path that is missing, or a folder that is a corpus.
InputScan for_each_document(const std::vector<InputPath>& paths, const std::string& except,
                            const std::function<void(const Document&)>& visit);

enum SplitIndex { kTrain = 0, kValid = 1, kTest = 2 };
inline constexpr const char* kSplitNames[] = {"train", "valid", "test"};

// Bytes [begin, end) of a document that go to a split.
struct Piece {
  SplitIndex split = kTrain;
  std::int64_t begin = 0, end = 0;
};

// Several documents: in the order of document_key, test first, then valid, then train. Up to
// kMaxRanked documents the fractions hold exactly (rounded, at least one document for a positive
// fraction); beyond that a document's key alone decides, as a fraction of 2^64. A single document:
// cut at the fractions, at the first character that begins there; train, valid, test. Error(kUsage)
// if the input is too small for the splits.
class SplitRule {
 public:
  SplitRule(const InputScan& scan, double valid_fraction, double test_fraction);
  bool has(SplitIndex split) const;
  std::vector<Piece> pieces(const Document& document) const;

 private:
  bool single_;
  double valid_fraction_, test_fraction_;
  std::uint64_t first_valid_key_ = 0, first_train_key_ = 0;
};

// Reads a piece in parts of at most chunk_bytes, cut behind a newline, else before a space, else
// between characters. Error(kData) if the file cannot be read.
void for_each_chunk(const Document& document, const Piece& piece, std::int64_t chunk_bytes,
                    const std::function<void(std::string_view text, std::int64_t offset)>& visit);

}  // namespace birkhoff
