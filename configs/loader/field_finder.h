// A search for the field at a position of a configuration text.
#pragma once

#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/tokenizer.h>

#include <map>
#include <string>
#include <vector>

namespace birkhoff {

// Sets up a tokenizer as Protobuf's text-format parser does.
void set_up_as_text_format(google::protobuf::io::Tokenizer& tokenizer);

// A token and the field that contains it. Lines and columns count from 0; a tab advances to the
// next multiple of 8.
struct TokenPosition {
  int line = 0, column = 0;
  std::string token;  // empty at the end of the text
  // The innermost message; null inside an unknown field.
  const google::protobuf::Descriptor* message = nullptr;
  // The field of that message; null between fields or if unknown.
  const google::protobuf::FieldDescriptor* field = nullptr;
  std::string path;  // of the field or message, from the root
};

// Protobuf's parser reports errors without the field, and some of them one token late. This class
// follows names and braces up to a position. It never fails: in malformed text it returns the last
// field that it recognized.
class FieldFinder {
 public:
  explicit FieldFinder(const google::protobuf::Descriptor& root);

  void run(const std::string& text, int line, int column);

  // The last token that starts at or before the position, and the token before that.
  const TokenPosition& here() const { return here_; }
  const TokenPosition& before() const { return before_; }

 private:
  struct Frame {
    const google::protobuf::Descriptor* message;
    std::string path, field = {};
    std::map<std::string, int> counts = {};  // elements of repeated fields so far
    bool in_list = false;
  };

  void take(const google::protobuf::io::Tokenizer::Token& token);
  void enter_message();
  TokenPosition position(const google::protobuf::io::Tokenizer::Token& token) const;

  std::vector<Frame> frames_;
  bool in_value_ = false;     // after a colon
  bool value_ended_ = false;  // the next token starts something new
  TokenPosition here_, before_;
};

}  // namespace birkhoff
