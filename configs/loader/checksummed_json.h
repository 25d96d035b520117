// Manifests as text: a message becomes one JSON object that begins with a checksum of all bytes
// after it, so that readers detect damage anywhere before they trust any field.
//
//   byte 0   {"checksum":"
//   byte 13  32 lower-case hexadecimal digits: XXH3-128 of the text from byte 47 to its end
//   byte 45  ",
//   byte 47  the rest of the object
#pragma once

#include <google/protobuf/message.h>

#include <string>

namespace birkhoff {

// Returns the text, which uses the .proto's field names and ends in a newline. The message must not
// be empty and must not set a field named `checksum`.
std::string checksummed_json(const google::protobuf::Message& message);

// kOptional: also accepts texts of earlier versions, which have no checksum.
enum class Checksum { kRequired, kOptional };

// Fills `message`. Throws std::invalid_argument if the checksum or the JSON is wrong, or if the
// text has a field that the message lacks.
void parse_checksummed_json(const std::string& text, Checksum checksum,
                            google::protobuf::Message& message);

}  // namespace birkhoff
