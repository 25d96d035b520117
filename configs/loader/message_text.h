// Formatting of names and values from user input for one-line messages.
#pragma once

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <string>
#include <vector>

namespace birkhoff {

// Returns the value in single quotes, truncated if long, with control characters escaped.
std::string quoted(const std::string& value);

// Makes text from a damaged file or another library fit for a message: one line, truncated if long.
std::string printable(std::string text);

// A value that is not a message, as text; index is -1 for fields that are not lists.
std::string value_text(const google::protobuf::Message& message,
                       const google::protobuf::FieldDescriptor* field, int index = -1);

// "unknown field 'stepz' in train; did you mean 'steps'?". If no name is near, suggests where a
// field of that name exists, or lists the fields of the message.
std::string unknown_field(const std::string& name, const std::string& where,
                          const google::protobuf::Descriptor& message);

// "1000" for "1e3"; empty if the text is not an integer with an exponent, or is beyond 2^53.
std::string plain_integer(const std::string& text);

bool is_integer(const google::protobuf::FieldDescriptor& field);

// The field's (range), with integers written without exponents. Empty if it has none.
std::string range_text(const google::protobuf::FieldDescriptor& field);

std::vector<std::string> field_names(const google::protobuf::Descriptor& message);
std::vector<std::string> enum_names(const google::protobuf::EnumDescriptor& type);
std::vector<std::string> oneof_names(const google::protobuf::OneofDescriptor& oneof);

}  // namespace birkhoff
