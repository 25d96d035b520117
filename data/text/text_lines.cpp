#include "data/text/text_lines.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "cluster/base/error.h"
#include "data/text/packed_text.h"

namespace birkhoff {

TextLines::TextLines(File file, std::string shown_path)
    : TextLines(TextFile(std::move(file), shown_path), shown_path, kMaxLineBytes) {}

TextLines::TextLines(TextFile file, std::string shown_path, std::int64_t max_line_bytes)
    : file_(std::move(file)),
      shown_path_(std::move(shown_path)),
      max_line_bytes_(static_cast<std::size_t>(max_line_bytes)) {}

std::optional<std::string_view> TextLines::next() {
  ++number_;
  std::size_t end = buffer_.find('\n', begin_);
  while (end == std::string::npos && buffer_.size() - begin_ <= max_line_bytes_) {
    const std::size_t had = buffer_.size() - begin_;
    if (!read_more()) break;
    end = buffer_.find('\n', had);
  }
  if (begin_ == buffer_.size()) return std::nullopt;
  end = std::min(end, buffer_.size());
  std::string_view line(buffer_.data() + begin_, end - begin_);
  if (number_ == 1) {
    require_not_packed(shown_path_, line);
    if (line.starts_with(kUtf8Mark)) line.remove_prefix(kUtf8Mark.size());
  }
  if (line.size() > max_line_bytes_) {
    fail(
        ExitCode::kData,
        "{}: the line is longer than {} bytes; cut its text, or give a file with one text per line",
        place(), max_line_bytes_);
  }
  begin_ = std::min(end + 1, buffer_.size());
  if (line.ends_with('\r')) line.remove_suffix(1);
  return line;
}

std::string TextLines::place() const { return fmt::format("{}{}{}", shown_path_, kUnit, number_); }

bool TextLines::read_more() {
  buffer_.erase(0, begin_);
  begin_ = 0;
  const std::size_t had = buffer_.size();
  buffer_.resize(had + kMaxLineBytes);
  buffer_.resize(had + file_.read_some(buffer_.data() + had, kMaxLineBytes));
  return buffer_.size() > had;
}

}  // namespace birkhoff
