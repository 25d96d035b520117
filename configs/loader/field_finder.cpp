#include "configs/loader/field_finder.h"

#include <google/protobuf/io/zero_copy_stream_impl_lite.h>

#include "configs/loader/source_locations.h"

namespace birkhoff {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::io::Tokenizer;

struct IgnoreErrors : google::protobuf::io::ErrorCollector {
  void AddError(int, google::protobuf::io::ColumnNumber, const std::string&) override {}
};

const FieldDescriptor* find(const Descriptor* message, const std::string& name) {
  return message == nullptr ? nullptr : message->FindFieldByName(name);
}

bool is_string(const std::string& token) {
  return token.starts_with('"') || token.starts_with('\'');
}

}  // namespace

void set_up_as_text_format(Tokenizer& tokenizer) {
  tokenizer.set_comment_style(Tokenizer::SH_COMMENT_STYLE);
  tokenizer.set_allow_f_after_float(true);
  tokenizer.set_require_space_after_number(false);
  tokenizer.set_allow_multiline_strings(true);
}

FieldFinder::FieldFinder(const Descriptor& root) { frames_.push_back({&root, ""}); }

void FieldFinder::run(const std::string& text, int line, int column) {
  google::protobuf::io::ArrayInputStream input(text.data(), static_cast<int>(text.size()));
  IgnoreErrors ignored;
  Tokenizer tokenizer(&input, &ignored);
  set_up_as_text_format(tokenizer);
  const auto behind = [&](const Tokenizer::Token& token) {
    return token.line > line || (token.line == line && token.column > column);
  };
  while (tokenizer.Next()) {
    if (behind(tokenizer.current())) return;
    take(tokenizer.current());
  }
  if (!behind(tokenizer.current())) take(tokenizer.current());  // the end of the text
}

void FieldFinder::take(const Tokenizer::Token& token) {
  const bool continues = is_string(token.text) && is_string(here_.token);  // one value
  if (value_ended_ && !continues) {
    frames_.back().field.clear();
    value_ended_ = false;
  }
  const bool is_name =
      token.type == Tokenizer::TYPE_IDENTIFIER && !in_value_ && !frames_.back().in_list;
  if (is_name) frames_.back().field = token.text;
  before_ = here_;
  here_ = position(token);
  if (is_name) return;
  Frame& frame = frames_.back();
  if (token.text == ":") {
    in_value_ = true;
  } else if (token.text == "[") {
    frame.in_list = true;
  } else if (token.text == "]") {
    frame.in_list = in_value_ = false;
    value_ended_ = true;
  } else if (token.text == "{" || token.text == "<") {
    enter_message();
  } else if ((token.text == "}" || token.text == ">") && frames_.size() > 1) {
    frames_.pop_back();
    value_ended_ = !frames_.back().in_list;
  } else if (in_value_ && token.text != "-" && !frame.in_list) {
    in_value_ = false;
    value_ended_ = true;
  }
}

void FieldFinder::enter_message() {
  Frame& frame = frames_.back();
  const FieldDescriptor* field = find(frame.message, frame.field);
  std::string path = join_path(frame.path, frame.field);
  if (field != nullptr && field->is_repeated()) {
    path = join_path(path, std::to_string(frame.counts[frame.field]++));
  }
  in_value_ = false;
  frames_.push_back({field == nullptr ? nullptr : field->message_type(), path});
}

TokenPosition FieldFinder::position(const Tokenizer::Token& token) const {
  const Frame& frame = frames_.back();
  return {token.line,
          token.column,
          token.text,
          frame.message,
          find(frame.message, frame.field),
          frame.field.empty() ? frame.path : join_path(frame.path, frame.field)};
}

}  // namespace birkhoff
