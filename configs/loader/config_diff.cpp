#include <google/protobuf/descriptor.h>

#include <algorithm>

#include "configs/loader/config_io.h"
#include "configs/loader/message_text.h"
#include "configs/loader/source_locations.h"

namespace birkhoff {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

// A value or message as text; index is -1 for fields that are not lists.
std::string text_of(const Message& message, const FieldDescriptor* field, int index) {
  if (field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) {
    return value_text(message, field, index);
  }
  const auto& reflection = *message.GetReflection();
  const Message& value = index < 0 ? reflection.GetMessage(message, field)
                                   : reflection.GetRepeatedMessage(message, field, index);
  std::string text = value.ShortDebugString();
  return text.empty() ? "{}" : "{ " + text + " }";
}

class Differ {
 public:
  // choice_fixed: the chosen members of this message's oneofs are fixed.
  void compare(const Message& before, const Message& after, const std::string& path, bool fixed,
               bool choice_fixed = false) {
    for (int i = 0; i < before.GetDescriptor()->field_count(); ++i) {
      const FieldDescriptor* field = before.GetDescriptor()->field(i);
      const bool field_fixed = fixed || field->options().GetExtension(configs::fixed);
      const std::string field_path = join_path(path, field->name());
      if (field->is_repeated()) {
        const int size = std::max(count(before, field), count(after, field));
        for (int j = 0; j < size; ++j) {
          compare_value(before, after, field, j, join_path(field_path, std::to_string(j)),
                        field_fixed);
        }
      } else {
        const bool choice = choice_fixed && field->real_containing_oneof() != nullptr;
        compare_value(before, after, field, -1, field_path, field_fixed, choice);
      }
    }
  }

  std::vector<ConfigDifference> take() { return std::move(differences_); }

 private:
  static int count(const Message& message, const FieldDescriptor* field) {
    return message.GetReflection()->FieldSize(message, field);
  }

  void compare_value(const Message& before, const Message& after, const FieldDescriptor* field,
                     int index, const std::string& path, bool fixed, bool choice_fixed = false) {
    const auto has = [&](const Message& m) {
      return index < 0 ? m.GetReflection()->HasField(m, field) : index < count(m, field);
    };
    if (!has(before) && !has(after)) return;
    if (has(before) && has(after) && field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      const auto& reflection = *before.GetReflection();
      return index < 0 ? compare(reflection.GetMessage(before, field),
                                 reflection.GetMessage(after, field), path, fixed,
                                 field->options().GetExtension(configs::fixed_choice))
                       : compare(reflection.GetRepeatedMessage(before, field, index),
                                 reflection.GetRepeatedMessage(after, field, index), path, fixed);
    }
    const std::string a = has(before) ? text_of(before, field, index) : "(absent)";
    const std::string b = has(after) ? text_of(after, field, index) : "(absent)";
    const bool choice_differs = has(before) != has(after);
    if (a == b) return;
    differences_.push_back({path, a, b, fixed || (choice_fixed && choice_differs),
                            field->options().GetExtension(configs::evaluation)});
  }

  std::vector<ConfigDifference> differences_;
};

}  // namespace

std::vector<ConfigDifference> diff_configs(const configs::Config& before,
                                           const configs::Config& after) {
  Differ differ;
  differ.compare(before, after, "", false);
  return differ.take();
}

}  // namespace birkhoff
