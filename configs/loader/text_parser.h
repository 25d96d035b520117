// A parser of Protobuf's text format, with limits, and errors that a user can act on.
#pragma once

#include <google/protobuf/message.h>

#include <cstdint>
#include <optional>
#include <string>

#include "configs/loader/source_locations.h"

namespace birkhoff {

constexpr std::int64_t kMaxTextBytes = 4 << 20;
constexpr int kMaxTextNesting = 100;

struct TextError {
  int line = 0, column = 0;  // from 1; a tab advances to the next multiple of 8
  std::string path;          // the field, relative to the message; empty outside any field
  std::string what;
};

// Merges `text` into `message`, which should be empty. Returns the first error. Records where each
// field was set in `places`, as name:line:column.
std::optional<TextError> parse_text(const std::string& text, google::protobuf::Message& message,
                                    const std::string& name = "",
                                    SourceLocations* places = nullptr);

}  // namespace birkhoff
