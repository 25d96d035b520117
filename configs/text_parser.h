// Protobuf text format to a message, with limits, and errors a user can act on.
#pragma once

#include <google/protobuf/message.h>

#include <cstdint>
#include <optional>
#include <string>

#include "configs/places.h"

namespace birkhoff {

constexpr std::int64_t kMaxTextBytes = 4 << 20;
constexpr int kMaxTextNesting = 100;

struct TextError {
  int line = 0, column = 0;  // from 1; a tab ends at the next multiple of 8
  std::string path;          // the field, relative to the message; empty if outside of any
  std::string what;
};

// Merges `text` into `message`, which should be empty. Errors: the first one.
std::optional<TextError> parse_text(const std::string& text, google::protobuf::Message& message,
                                    const std::string& name = "", Places* places = nullptr);

}  // namespace birkhoff
