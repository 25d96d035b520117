// Manifests as text: a message as one JSON object that begins with a checksum of all bytes behind
// it, so that damage anywhere is found before anything is believed.
//
//   byte 0   {"checksum":"
//   byte 13  32 lower-case hexadecimal digits: XXH3-128 of the text from byte 47 to its end
//   byte 45  ",
//   byte 47  the rest of the object
#pragma once

#include <google/protobuf/message.h>

#include <string>

namespace birkhoff {

// Field names are the .proto's; ends in a newline. The message is not empty, and sets no field of
// the name `checksum`.
std::string sealed_json(const google::protobuf::Message& message);

// kOptional: texts from before there was one are read, too.
enum class Checksum { kRequired, kOptional };

// Fills `message`. std::invalid_argument says what is wrong with the text: its checksum, its JSON,
// or a field that the message does not have.
void parse_sealed_json(const std::string& text, Checksum checksum,
                       google::protobuf::Message& message);

}  // namespace birkhoff
