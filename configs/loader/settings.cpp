#include "configs/loader/config_io.h"

#include <fmt/format.h>
#include <google/protobuf/descriptor.h>

#include <memory>
#include <vector>

#include "cluster/base/text/number_text.h"
#include "cluster/base/text/plural.h"
#include "configs/loader/message_text.h"
#include "configs/loader/text_parser.h"

namespace birkhoff {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

std::vector<std::string> split_path(const std::string& path) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0;;) {
    const std::size_t dot = path.find('.', begin);
    parts.push_back(path.substr(begin, dot - begin));
    if (dot == std::string::npos) return parts;
    begin = dot + 1;
  }
}

class Setting {
 public:
  explicit Setting(const std::string& setting) : place_("--set " + shorten(setting)) {
    const std::size_t equals = setting.find('=');
    if (equals == std::string::npos || equals == 0) error("expected path=value");
    path_ = setting.substr(0, equals);
    value_ = setting.substr(equals + 1);
  }

  void apply(Message& config, SourceLocations& places) {
    assign(config);
    places.forget(path_);
    places.set(path_, place_);
  }

 private:
  static std::string shorten(const std::string& setting) {
    const std::string text = quoted(setting);
    return text.substr(1, text.size() - 2);
  }

  [[noreturn]] void error(const std::string& what) const {
    throw Error(ExitCode::kConfig, place_ + ": " + what);
  }

  // Walks the path and creates messages and one new list element where needed.
  void assign(Message& config) {
    const std::vector<std::string> parts = split_path(path_);
    Message* message = &config;
    std::string walked;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const std::string where = walked.empty() ? "the configuration" : walked;
      const FieldDescriptor* field = message->GetDescriptor()->FindFieldByName(parts[i]);
      if (field == nullptr) error(unknown_field(parts[i], where, *message->GetDescriptor()));
      if (message == &config && field->name() == "include") {
        error("include belongs in a file; pass that file as the configuration");
      }
      const bool last = i + 1 == parts.size();
      const bool is_message = field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE;
      const Reflection& reflection = *message->GetReflection();
      if (field->is_repeated() && !last && !is_message) {
        const std::string list = join_path(walked, parts[i]);
        error(fmt::format("{} is a list of values; give all of them: {}=[...]", list, list));
      }
      if (field->is_repeated() && !last) {
        walked = join_path(walked, parts[i]);
        Message& element = list_element(*message, *field, parts[++i], walked);
        walked = join_path(walked, parts[i]);
        if (i + 1 == parts.size()) return assign_message(element);
        message = &element;
      } else if (last) {
        return is_message && !field->is_repeated()
                   ? assign_message(*reflection.MutableMessage(message, field))
                   : assign_field(*message, *field, walked);
      } else if (is_message) {
        walked = join_path(walked, parts[i]);
        message = reflection.MutableMessage(message, field);
      } else {
        error(fmt::format("'{}' is a value and has no field {}", join_path(walked, parts[i]),
                          quoted(parts[i + 1])));
      }
    }
  }

  Message& list_element(Message& message, const FieldDescriptor& field, const std::string& index,
                        const std::string& list) const {
    const Reflection& reflection = *message.GetReflection();
    const int size = reflection.FieldSize(message, &field);
    const int i = parse_number<int>(index).value_or(-1);
    if (i < 0 || i > size) {
      error(fmt::format("{} is not an index of {}: it has {}, so 0 to {} are valid ({} adds one)",
                        quoted(index), list, counted(size, "entry", "entries"), size, size));
    }
    return i == size ? *reflection.AddMessage(&message, &field)
                     : *reflection.MutableRepeatedMessage(&message, &field, i);
  }

  void parse(const std::string& text, Message& message, const std::string& where) const {
    const std::optional<TextError> found = parse_text(text, message);
    if (!found) return;
    const std::string at = join_path(where, found->path);
    error(found->path.empty() || at == path_ ? found->what : at + ": " + found->what);
  }

  void assign_message(Message& message) const {
    const std::size_t begin = value_.find_first_not_of(" \t\n");
    const std::size_t end = value_.find_last_not_of(" \t\n");
    if (begin == std::string::npos || value_[begin] != '{' || value_[end] != '}' || begin == end) {
      error(fmt::format("{} is a message; set one of its fields ({}) or give {{text}} in braces",
                        path_, fmt::join(field_names(*message.GetDescriptor()), ", ")));
    }
    message.Clear();
    parse(value_.substr(begin + 1, end - begin - 1), message, path_);
  }

  // A scalar, or a whole list.
  void assign_field(Message& message, const FieldDescriptor& field,
                    const std::string& where) const {
    const bool is_string = field.cpp_type() == FieldDescriptor::CPPTYPE_STRING;
    const bool quoted = value_.size() > 1 && value_.front() == '"' && value_.back() == '"';
    if (is_string && !field.is_repeated() && !quoted) {
      return message.GetReflection()->SetString(&message, &field, value_);
    }
    if (value_.find_first_not_of(" \t\n") == std::string::npos) error("the value is missing");
    if (field.is_repeated() && value_[value_.find_first_not_of(" \t\n")] != '[') {
      error(field.message_type() == nullptr
                ? fmt::format("{} is a list; give its values as [..., ...]", path_)
                : fmt::format("{} is a list; set one entry ({}.0) or give [{{...}}, {{...}}]",
                              path_, path_));
    }
    const std::unique_ptr<Message> scratch(message.New());
    const std::string plain = is_integer(field) ? plain_integer(value_) : "";
    parse(field.name() + ": " + (plain.empty() ? value_ : plain), *scratch, where);
    if (set_fields(*scratch).size() > 1) error("expected one value");
    message.GetReflection()->ClearField(&message, &field);
    message.MergeFrom(*scratch);
  }

  std::string place_, path_, value_;
};

}  // namespace

void apply_setting(const std::string& setting, configs::Config& config, SourceLocations& places) {
  Setting(setting).apply(config, places);
}

}  // namespace birkhoff
