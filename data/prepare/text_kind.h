// What a document's bytes say that it is: text, or something that its user did not mean.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "data/prepare/documents.h"

namespace birkhoff {

// Looks at the text of every document on its way to the tokenizer. One for each pass.
class TextChecker {
 public:
  // tokenizer: as messages name it. takes_bytes: any, as those of the tokenizer bytes; others need
  // UTF-8.
  TextChecker(std::string tokenizer, bool takes_bytes)
      : tokenizer_(std::move(tokenizer)), takes_bytes_(takes_bytes) {}

  // The next part of a document's text, from byte `offset` on, each document from its first byte
  // on; returns what is to be encoded: without the byte order mark that UTF-8 may begin with,
  // unless bytes are taken. Error(kData) names file, byte and cure where the text is no UTF-8.
  std::string_view check(const Document& document, std::string_view part, std::int64_t offset);

  // A line for each kind of oddity that was let through: how many documents, the first of them, and
  // what to do.
  std::vector<std::string> notes() const;

 private:
  struct Seen {
    std::int64_t documents = 0;
    std::string first;
  };
  void note(std::size_t kind, const Document& document);

  std::string tokenizer_;
  bool takes_bytes_;
  bool binary_ = false;       // the current document is noted as such, or as compressed
  std::array<Seen, 8> seen_;  // by kind, as text_kind.cpp numbers them
};

}  // namespace birkhoff
