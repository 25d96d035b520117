// Characters (Unicode code points) as tokens: their collection, their file, and (in the .cpp) the
// tokenizer.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace birkhoff {

// The code points of the training split, ascending, are ids 0, 1, ... The unknown id after them
// exists only if other splits have characters that the training split lacks. Memory: two bits per
// code point, whatever the text.
class CharVocabulary {
 public:
  // text: valid UTF-8.
  void add(std::string_view text, bool training);
  // The vocabulary file: "birkhoff chars 1", "unknown yes|no", then one hexadecimal code point per
  // line.
  std::string file_content() const;

 private:
  bool has_unknown() const;
  std::vector<bool> training_ = std::vector<bool>(0x110000), other_ = std::vector<bool>(0x110000);
};

}  // namespace birkhoff
