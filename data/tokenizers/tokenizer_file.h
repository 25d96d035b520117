// The tokenizers that are made from the content of a file, and the size limit of these files.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "data/tokenizers/tokenizer.h"

namespace birkhoff {

inline constexpr std::int64_t kTokenizerMaxBytes = 64 << 20;

// Of chars. content: the content of the file. file: its name in messages.
std::unique_ptr<Tokenizer> make_char_tokenizer(const std::string& content, const std::string& file,
                                               std::int64_t vocabulary);
// Of words or whitespace; the first line of the content says which.
std::unique_ptr<Tokenizer> make_word_tokenizer(const std::string& content, const std::string& file,
                                               std::int64_t vocabulary);

}  // namespace birkhoff
