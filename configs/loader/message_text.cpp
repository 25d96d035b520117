#include "configs/loader/message_text.h"

#include <fmt/format.h>
#include <google/protobuf/text_format.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "cluster/base/text/number_text.h"
#include "cluster/base/text/utf8.h"
#include "configs/loader/config_io.h"
#include "configs/loader/source_locations.h"

namespace birkhoff {

using google::protobuf::Descriptor;
using google::protobuf::EnumDescriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::OneofDescriptor;

namespace {

// The path of the first field called `name` in the message or below it, without indices; empty if
// none.
std::string find_below(const Descriptor& message, const std::string& name) {
  if (message.FindFieldByName(name) != nullptr) return name;
  for (int i = 0; i < message.field_count(); ++i) {
    if (message.field(i)->message_type() == nullptr) continue;
    const std::string found = find_below(*message.field(i)->message_type(), name);
    if (!found.empty()) return message.field(i)->name() + "." + found;
  }
  return "";
}

}  // namespace

std::string unknown_field(const std::string& name, const std::string& where,
                          const Descriptor& message) {
  const std::vector<std::string> names = field_names(message);
  const std::string nearest = nearest_name(name, names);
  const std::string elsewhere = find_below(*configs::Config::descriptor(), name);
  return fmt::format("unknown field {} in {}; {}", quoted(name), where,
                     !nearest.empty() ? fmt::format("did you mean '{}'?", nearest)
                     : !elsewhere.empty()
                         ? fmt::format("did you mean {}?", elsewhere)
                         : fmt::format("its fields are {}", fmt::join(names, ", ")));
}

std::string plain_integer(const std::string& text) {
  const std::optional<double> value = parse_number<double>(text);
  const bool whole = value && std::abs(*value) <= 0x1p53 && *value == std::floor(*value);
  return whole && text.find_first_of("eE") != std::string::npos ? fmt::format("{:.0f}", *value)
                                                                : "";
}

bool is_integer(const FieldDescriptor& field) {
  const FieldDescriptor::CppType type = field.cpp_type();
  return type == FieldDescriptor::CPPTYPE_INT32 || type == FieldDescriptor::CPPTYPE_INT64 ||
         type == FieldDescriptor::CPPTYPE_UINT32 || type == FieldDescriptor::CPPTYPE_UINT64;
}

std::string value_text(const Message& message, const FieldDescriptor* field, int index) {
  std::string text;
  google::protobuf::TextFormat::PrintFieldValueToString(message, field, index, &text);
  return text;
}

const FieldDescriptor* chosen_member(const Message& message) {
  return message.GetReflection()->GetOneofFieldDescriptor(message,
                                                          message.GetDescriptor()->oneof_decl(0));
}

std::vector<const FieldDescriptor*> set_fields(const Message& message) {
  std::vector<const FieldDescriptor*> fields;
  message.GetReflection()->ListFields(message, &fields);
  return fields;
}

std::vector<SetValue> set_values(const Message& message, const std::string& path) {
  const auto& reflection = *message.GetReflection();
  std::vector<SetValue> values;
  for (const FieldDescriptor* field : set_fields(message)) {
    const std::string at = join_path(path, field->name());
    const bool is_message = field->message_type() != nullptr;
    if (!field->is_repeated()) {
      const Message* const own = is_message ? &reflection.GetMessage(message, field) : nullptr;
      values.push_back({field, -1, at, own});
      continue;
    }
    for (int i = 0; i < reflection.FieldSize(message, field); ++i) {
      const Message* const own =
          is_message ? &reflection.GetRepeatedMessage(message, field, i) : nullptr;
      values.push_back({field, i, join_path(at, std::to_string(i)), own});
    }
  }
  return values;
}

std::string range_text(const FieldDescriptor& field) {
  std::string range = field.options().GetExtension(configs::range);
  if (!is_integer(field)) return range;
  for (std::size_t begin = 1; begin < range.size();) {  // after the bracket
    const std::size_t end = range.find_first_of(",])", begin);
    const std::string plain = plain_integer(range.substr(begin, end - begin));
    if (!plain.empty()) range.replace(begin, end - begin, plain);
    begin = range.find_first_of(",])", begin) + 2;
  }
  if (field.options().GetExtension(configs::odd)) range += ", odd";
  return range;
}

std::vector<std::string> field_names(const Descriptor& message) {
  std::vector<std::string> names;
  for (int i = 0; i < message.field_count(); ++i) {
    if (!message.field(i)->options().GetExtension(configs::replaced))
      names.push_back(message.field(i)->name());
  }
  return names;
}

std::vector<std::string> enum_names(const EnumDescriptor& type) {
  std::vector<std::string> names;
  for (int i = 0; i < type.value_count(); ++i) names.push_back(type.value(i)->name());
  return names;
}

std::vector<std::string> oneof_names(const OneofDescriptor& oneof) {
  std::vector<std::string> names;
  for (int i = 0; i < oneof.field_count(); ++i) names.push_back(oneof.field(i)->name());
  return names;
}

std::string quoted(const std::string& value) {
  constexpr std::size_t kLongest = 60;
  std::size_t end = std::min(value.size(), kLongest);
  // Do not cut inside a UTF-8 sequence.
  while (end > 0 && end < value.size() && (static_cast<unsigned char>(value[end]) & 0xc0) == 0x80) {
    --end;
  }
  const bool text = find_invalid_utf8(value) == std::string::npos;
  std::string out = "'";
  for (const char c : value.substr(0, end)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f || (!text && byte > 0x7f)) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += c;
    }
  }
  return out + (end < value.size() ? "..." : "") + "'";
}

std::string printable(std::string text) {
  text.resize(std::min<std::size_t>(text.size(), 300));
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }, '?');
  return text;
}

}  // namespace birkhoff
