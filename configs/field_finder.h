// Which field a position of a configuration text is in.
#pragma once

#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/tokenizer.h>

#include <map>
#include <string>
#include <vector>

namespace birkhoff {

// Sets a tokenizer up as the parser of Protobuf's text format does.
void set_up_as_text_format(google::protobuf::io::Tokenizer& tokenizer);

// A token and the field it stands in. Line and column count from 0, a tab ends at the next multiple
// of 8.
struct Spot {
  int line = 0, column = 0;
  std::string token;  // empty at the end of the text
  const google::protobuf::Descriptor* message =
      nullptr;  // innermost message; null inside an unknown field
  const google::protobuf::FieldDescriptor* field =
      nullptr;       // its field; null between fields or if unknown
  std::string path;  // of the field or message, from the root
};

// Protobuf's parser reports errors without the field, and some of them one token late. This follows
// names and braces up to a position. It never fails: in nonsense it gives the last sensible field.
class FieldFinder {
 public:
  explicit FieldFinder(const google::protobuf::Descriptor& root);

  void run(const std::string& text, int line, int column);

  // The last token that starts at or before the position, and the token before that.
  const Spot& here() const { return here_; }
  const Spot& before() const { return before_; }

 private:
  struct Frame {
    const google::protobuf::Descriptor* message;
    std::string path, field = {};
    std::map<std::string, int> counts = {};  // elements of repeated fields so far
    bool in_list = false;
  };

  void take(const google::protobuf::io::Tokenizer::Token& token);
  void enter_message();
  Spot spot(const google::protobuf::io::Tokenizer::Token& token) const;

  std::vector<Frame> frames_;
  bool in_value_ = false;     // behind a colon
  bool value_ended_ = false;  // the next token starts something new
  Spot here_, before_;
};

}  // namespace birkhoff
