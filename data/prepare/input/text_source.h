// The documents in the files of `birkhoff prepare`: a file is a document, or holds many of them.
// Compressed files are read as what they hold (data/text/text_file.h). See
// docs/corpus_format.md, "Many documents in a file".
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "data/prepare/input/documents.h"

namespace birkhoff {

// How documents lie in files.
struct TextFormat {
  enum Kind {
    kFiles,  // a file is a document
    kLines,  // a line is
    // What is between two occurrences of a text is. A line end right after one belongs to it,
    // unless the text itself begins or ends in a line end.
    kSeparator,
    kJsonLines,  // a string in the JSON object of each line is
  };
  Kind kind = kFiles;
  std::string name =
      {};  // of kSeparator: that text; of kJsonLines: the field that holds the string

  bool holds_many() const { return kind != kFiles; }
};

// "lines", "separator " and its hash, or "JSON Lines " and the field.
std::string describe(const TextFormat& format);

// Maximum number of bytes of a document among many in a file, or of its line. One is in memory.
inline constexpr std::int64_t kMaxTextBytes = 64 << 20;

// Visits the documents of the files that for_each_document() finds, in order. Documents of a file
// that holds many have the names FILE:NUMBER, counted from 1 by lines, or by separators; empty ones
// are left out and counted. The scan counts documents and bytes of their text; its hash is that of
// the files. Error(kData) names file and line, or document, of what cannot be read.
InputScan for_each_text(const std::vector<InputPath>& paths, const std::string& except,
                        const TextFormat& format,
                        const std::function<void(const Document&)>& visit);

// The string in field `name` of a line that holds a JSON object. place: of the line, for messages.
// Error(kData): the line is not JSON (RFC 8259, UTF-8, with whole surrogate pairs), or has no such
// string.
std::string json_text(std::string_view line, const std::string& name, const std::string& place);

}  // namespace birkhoff
