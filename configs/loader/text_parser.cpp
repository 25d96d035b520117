#include "configs/loader/text_parser.h"

#include <fmt/format.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/text_format.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <string>
#include <vector>

#include "cluster/base/text/utf8.h"
#include "configs/loader/config_io.h"
#include "configs/loader/message_text.h"

namespace birkhoff {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::TextFormat;
using google::protobuf::io::Tokenizer;

// Protobuf's message about the first error, and its position (from 0).
struct FirstError : google::protobuf::io::ErrorCollector {
  void AddError(int l, google::protobuf::io::ColumnNumber c, const std::string& m) override {
    if (message.empty()) {
      line = std::max(l, 0);
      column = std::max(c, 0);
      message = m;
    }
  }
  int line = 0, column = 0;
  std::string message;
};

// A token and the field that contains it. Lines and columns count from 0; a tab advances to the
// next multiple of 8.
struct TokenPosition {
  int line = 0, column = 0;
  std::string token;  // empty at the end of the text
  // The innermost message; null inside an unknown field.
  const Descriptor* message = nullptr;
  // The field of that message; null between fields or if unknown.
  const FieldDescriptor* field = nullptr;
  std::string path;  // of the field or message, from the root
};

// Sets up a tokenizer as Protobuf's text-format parser does.
void set_up_as_text_format(Tokenizer& tokenizer) {
  tokenizer.set_comment_style(Tokenizer::SH_COMMENT_STYLE);
  tokenizer.set_allow_f_after_float(true);
  tokenizer.set_require_space_after_number(false);
  tokenizer.set_allow_multiline_strings(true);
}

const FieldDescriptor* find(const Descriptor* message, const std::string& name) {
  return message == nullptr ? nullptr : message->FindFieldByName(name);
}

bool is_string(const std::string& token) {
  return token.starts_with('"') || token.starts_with('\'');
}

// Protobuf's parser reports errors without the field, and some of them one token late. This class
// follows names and braces up to a position. It never fails: in malformed text it returns the last
// field that it recognized.
class FieldFinder {
 public:
  explicit FieldFinder(const Descriptor& root) { frames_.push_back({&root, ""}); }

  void run(const std::string& text, int line, int column) {
    google::protobuf::io::ArrayInputStream input(text.data(), static_cast<int>(text.size()));
    FirstError ignored;
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

  // The last token that starts at or before the position, and the token before that.
  const TokenPosition& here() const { return here_; }
  const TokenPosition& before() const { return before_; }

 private:
  struct Frame {
    const Descriptor* message;
    std::string path, field = {};
    std::map<std::string, int> counts = {};  // elements of repeated fields so far
    bool in_list = false;
  };

  void take(const Tokenizer::Token& token) {
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

  void enter_message() {
    Frame& frame = frames_.back();
    const FieldDescriptor* field = find(frame.message, frame.field);
    std::string path = join_path(frame.path, frame.field);
    if (field != nullptr && field->is_repeated()) {
      path = join_path(path, std::to_string(frame.counts[frame.field]++));
    }
    in_value_ = false;
    frames_.push_back({field == nullptr ? nullptr : field->message_type(), path});
  }

  TokenPosition position(const Tokenizer::Token& token) const {
    const Frame& frame = frames_.back();
    return {token.line,
            token.column,
            token.text,
            frame.message,
            find(frame.message, frame.field),
            frame.field.empty() ? frame.path : join_path(frame.path, frame.field)};
  }

  std::vector<Frame> frames_;
  bool in_value_ = false;     // after a colon
  bool value_ended_ = false;  // the next token starts something new
  TokenPosition here_, before_;
};

std::string got(const TokenPosition& position) {
  return position.token.empty() ? "the end of the text" : quoted(position.token);
}

bool is_unsigned(const FieldDescriptor* field) {
  return field != nullptr && (field->cpp_type() == FieldDescriptor::CPPTYPE_UINT32 ||
                              field->cpp_type() == FieldDescriptor::CPPTYPE_UINT64);
}

// Turns Protobuf's message into ours and chooses the position to report.
TextError explain(const std::string& message, const FirstError& error, const FieldFinder& finder) {
  const TokenPosition& here = finder.here();
  const TokenPosition& before = finder.before();
  const auto is = [&](const char* text) { return message.starts_with(text); };
  const auto at = [](const TokenPosition& position, std::string what) {
    return TextError{position.line + 1, position.column + 1, printable(position.path),
                     std::move(what)};
  };
  if (is("Message type \"") && before.message != nullptr) {
    return at(before, unknown_field(before.token, before.message->full_name(), *before.message));
  }
  if (is("Non-repeated field")) return at(before, "is given twice; keep one");
  if (is("Field \"") && before.field != nullptr && before.field->containing_oneof() != nullptr) {
    return at(before, fmt::format("a second choice where only one is allowed; keep one of {}",
                                  fmt::join(oneof_names(*before.field->containing_oneof()), ", ")));
  }
  if (is("Unknown enumeration value") && before.field != nullptr &&
      before.field->enum_type() != nullptr) {
    const std::vector<std::string> names = enum_names(*before.field->enum_type());
    const std::string nearest = nearest_name(before.token, names);
    return at(before, fmt::format("unknown value {}; allowed: {}{}", quoted(before.token),
                                  fmt::join(names, ", "),
                                  nearest.empty() ? "" : "; did you mean '" + nearest + "'?"));
  }
  if (is("Expected integer or identifier") && here.field != nullptr &&
      here.field->enum_type() != nullptr) {
    return at(here, fmt::format("expected one of {}, got {}",
                                fmt::join(enum_names(*here.field->enum_type()), ", "), got(here)));
  }
  if (is("Invalid value for boolean")) {
    return at(before, "expected true or false, got " + got(before));
  }
  if (is("Integer out of range") && here.field != nullptr) {
    return at(here, fmt::format("{} does not fit {}{}", got(here), here.field->cpp_type_name(),
                                before.token == "-" ? " (with its minus sign)" : ""));
  }
  if (is("Expected integer")) {
    const char* least = is_unsigned(here.field) ? " of at least 0" : "";
    const std::string plain = plain_integer(here.token);
    return at(here, fmt::format("expected an integer{}, got {}{}", least, got(here),
                                plain.empty() ? "" : "; write " + plain));
  }
  if (is("Expected double")) return at(here, "expected a number, got " + got(here));
  if (is("Expected string")) return at(here, "expected a string in quotes, got " + got(here));
  if (is("Expected identifier") && here.field != nullptr &&
      here.field->cpp_type() == FieldDescriptor::CPPTYPE_BOOL) {
    return at(here, "expected true or false, got " + got(here));
  }
  if (is("Expected identifier")) {
    const char* end = here.path.empty() ? "" : " or '}'";
    return at(here, fmt::format("expected a field name{}, got {}", end, got(here)));
  }
  if (is("Expected \":\"")) {
    return at(here, "expected ':' and a value, got " + got(here));
  }
  if (is("Expected \"{\"")) return at(here, "expected '{', got " + got(here));
  if (is("Message is too deep")) {
    return at(here, fmt::format("nested deeper than {} levels", kMaxTextNesting));
  }
  std::string what = printable(message.substr(0, message.find_last_not_of(". ") + 1));
  what[0] = static_cast<char>(std::tolower(static_cast<unsigned char>(what[0])));
  return TextError{error.line + 1, error.column + 1, printable(here.path), what};
}

// Finds the first number that Protobuf would read as octal, 010 as 8, or as hexadecimal.
std::optional<TextError> find_other_base(const std::string& text, const Descriptor& root) {
  google::protobuf::io::ArrayInputStream input(text.data(), static_cast<int>(text.size()));
  FirstError ignored;
  Tokenizer tokenizer(&input, &ignored);
  set_up_as_text_format(tokenizer);
  while (tokenizer.Next()) {
    const Tokenizer::Token& token = tokenizer.current();
    if (token.type != Tokenizer::TYPE_INTEGER || token.text.size() < 2 || token.text[0] != '0') {
      continue;
    }
    const bool octal = std::isdigit(static_cast<unsigned char>(token.text[1])) != 0;
    FieldFinder finder(root);
    finder.run(text, token.line, token.column);
    return TextError{token.line + 1, token.column + 1, printable(finder.here().path),
                     fmt::format("{} {}", quoted(token.text),
                                 octal ? "starts with a zero, which would make it octal; leave the "
                                         "zero out"
                                       : "is hexadecimal; write it as a decimal number")};
  }
  return std::nullopt;
}

void record_places(const Message& message, const TextFormat::ParseInfoTree& tree,
                   const std::string& name, const std::string& path, SourceLocations& places) {
  for (const SetValue& value : set_values(message, path)) {
    const TextFormat::ParseLocation location = tree.GetLocation(value.field, value.index);
    places.set(value.path, fmt::format("{}:{}:{}", name, location.line + 1, location.column + 1));
    if (value.message == nullptr) continue;
    record_places(*value.message, *tree.GetTreeForNested(value.field, value.index), name,
                  value.path, places);
  }
}

// An error at a byte offset, as line and column.
TextError error_at(const std::string& text, std::size_t offset, const std::string& what) {
  TextError error{1, 1, "", what};
  for (std::size_t i = 0; i < offset; ++i) {
    error.column += 1;
    if (text[i] == '\n') {
      error.line += 1;
      error.column = 1;
    }
  }
  return error;
}

}  // namespace

std::optional<TextError> parse_text(const std::string& given, Message& message,
                                    const std::string& name, SourceLocations* places) {
  // Some editors start a file with a byte order mark.
  const std::string text = given.starts_with("\xef\xbb\xbf") ? given.substr(3) : given;
  if (static_cast<std::int64_t>(text.size()) > kMaxTextBytes) {
    return TextError{
        1, 1, "",
        fmt::format("{} bytes of text; at most {} are allowed", text.size(), kMaxTextBytes)};
  }
  std::size_t bad = text.find('\0');
  if (bad == std::string::npos) bad = find_invalid_utf8(text);
  if (bad != std::string::npos) {
    return error_at(text, bad,
                    fmt::format("byte 0x{:02x} is not UTF-8 text; is this a .txtpb file?",
                                static_cast<unsigned char>(text[bad])));
  }
  if (const auto other = find_other_base(text, *message.GetDescriptor())) return other;
  FirstError error;
  TextFormat::ParseInfoTree tree;
  TextFormat::Parser parser;
  parser.RecordErrorsTo(&error);
  parser.WriteLocationsTo(&tree);
  parser.SetRecursionLimit(kMaxTextNesting);
  if (!parser.ParseFromString(text, &message)) {
    FieldFinder finder(*message.GetDescriptor());
    finder.run(text, error.line, error.column);
    return explain(error.message, error, finder);
  }
  if (places != nullptr) record_places(message, tree, name, "", *places);
  return std::nullopt;
}

}  // namespace birkhoff
