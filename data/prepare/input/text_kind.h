// Detection of a document's kind by its bytes: text, or something that the user did not intend.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "data/prepare/input/documents.h"
#include "data/text/packed_text.h"

namespace birkhoff {

// Checks the text of every document on its way to the tokenizer. A document among many in a
// file is not a file: it may begin with any bytes. Use one object for each pass.
class TextChecker {
 public:
  // tokenizer: its name in messages. takes_bytes: it accepts any bytes, as the tokenizer `bytes`
  // does; all other tokenizers need UTF-8.
  TextChecker(std::string tokenizer, bool takes_bytes)
      : tokenizer_(std::move(tokenizer)), takes_bytes_(takes_bytes) {}

  // Checks the next part of a document, which begins at byte `offset`. Each document must be passed
  // from its first byte on. Returns the text to encode: without the byte order mark that UTF-8 may
  // begin with, unless any bytes are accepted. If the text is not UTF-8, Error(kData) names the
  // file, the byte and the remedy.
  std::string_view check(const Document& document, std::string_view part, std::int64_t offset);

  // A line for each kind of oddity that was accepted: the number of documents, the first of them,
  // and what to do.
  std::vector<std::string> notes() const;

 private:
  struct Seen {
    std::int64_t documents = 0;
    std::string first;
  };
  void note(std::size_t kind, const Document& document);

  std::string tokenizer_;
  bool takes_bytes_;
  bool binary_ = false;       // the current document has been noted as binary or compressed
  std::array<Seen, 9> seen_;  // by kind, as numbered in text_kind.cpp
};

}  // namespace birkhoff
