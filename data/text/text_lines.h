// The lines of a text, one at a time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "cluster/base/files/file.h"
#include "data/text/text_file.h"

namespace birkhoff {

// Maximum number of bytes of a line, without its line feed, unless a reader allows more.
inline constexpr std::int64_t kMaxLineBytes = 1 << 20;

class TextLines {
 public:
  // shown_path: for messages.
  TextLines(File file, std::string shown_path);
  TextLines(TextFile file, std::string shown_path, std::int64_t max_line_bytes);

  // The next line without its end (a line feed, or a carriage return and a line feed); nullopt
  // after the last. It is valid until the next call. The byte order mark that UTF-8 may begin with
  // is dropped. gzip and zstd data are unpacked. Error(kData) if the text is damaged, compressed in
  // another way or UTF-16, or the line is too long.
  std::optional<std::string_view> next();
  // Whether next() returns without reading the file.
  bool has_line() const { return buffer_.find('\n', begin_) != std::string::npos; }

  // The location of the line that next() has returned: "PATH:LINE".
  std::string place() const;
  static constexpr std::string_view kUnit = ":";  // between path and number
  std::int64_t number() const { return number_; }

 private:
  bool read_more();

  TextFile file_;
  std::string shown_path_, buffer_;
  std::size_t max_line_bytes_;
  std::size_t begin_ = 0;  // of the next line, in the buffer
  std::int64_t number_ = 0;
};

}  // namespace birkhoff
