// Names and values of users' texts, fit for a one-line message.
#pragma once

#include <google/protobuf/descriptor.h>

#include <string>
#include <vector>

namespace birkhoff {

// A value for a message: in single quotes, cut if long, control characters escaped.
std::string shown(const std::string& value);

// Words of a damaged file or of a foreign library, fit for a message: one line, cut if long.
std::string printable(std::string text);

// "unknown field 'stepz' in train; did you mean 'steps'?", else where a field of that name is, else
// the fields there are.
std::string unknown_field(const std::string& name, const std::string& where,
                          const google::protobuf::Descriptor& message);

// "1000" for "1e3"; empty where the text is not an integer with an exponent, or beyond 2^53.
std::string plain_integer(const std::string& text);

bool is_integer(const google::protobuf::FieldDescriptor& field);

// The field's (range) as people write its numbers: without exponents where they are integers. Empty
// if it has none.
std::string range_text(const google::protobuf::FieldDescriptor& field);

std::vector<std::string> field_names(const google::protobuf::Descriptor& message);
std::vector<std::string> enum_names(const google::protobuf::EnumDescriptor& type);
std::vector<std::string> oneof_names(const google::protobuf::OneofDescriptor& oneof);

}  // namespace birkhoff
