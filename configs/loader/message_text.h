// The values of Protobuf messages, and formatting of names and values from user input for one-line
// messages.
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

// The chosen member of the message's first oneof; null: none is chosen.
const google::protobuf::FieldDescriptor* chosen_member(const google::protobuf::Message& message);

// The fields that are set, in the order of their numbers.
std::vector<const google::protobuf::FieldDescriptor*> set_fields(
    const google::protobuf::Message& message);

// A value that is set: a field, or an entry of a list.
struct SetValue {
  const google::protobuf::FieldDescriptor* field;
  int index;                                 // of the entry; -1: the field is no list
  std::string path;                          // dotted (source_locations.h)
  const google::protobuf::Message* message;  // null: the value is not a message
};
// All values that are set in the message at `path`, in the order of their fields' numbers.
std::vector<SetValue> set_values(const google::protobuf::Message& message, const std::string& path);

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
