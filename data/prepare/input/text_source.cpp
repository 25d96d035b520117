#include "data/prepare/input/text_source.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "cluster/base/error.h"
#include "cluster/base/files/checksum.h"
#include "cluster/base/files/file.h"
#include "cluster/base/text/utf8.h"
#include "configs/loader/message_text.h"
#include "data/text/packed_text.h"
#include "data/text/text_file.h"
#include "data/text/text_lines.h"

namespace birkhoff {
namespace {

// Receives the events of a line's JSON and keeps the one string.
class FieldFinder : public nlohmann::json::json_sax_t {
 public:
  FieldFinder(const std::string& name, const std::string& place) : name_(name), place_(place) {}

  std::string text() {
    if (text_) return std::move(*text_);
    fail(ExitCode::kData, "{}: the line's object has no field {}; name the field of the texts",
         place_, quoted(name_));
  }

  bool null() override { return value("null"); }
  bool boolean(bool) override { return value("a boolean"); }
  bool number_integer(number_integer_t) override { return value("a number"); }
  bool number_unsigned(number_unsigned_t) override { return value("a number"); }
  bool number_float(number_float_t, const string_t&) override { return value("a number"); }
  bool binary(binary_t&) override { return value("binary data"); }
  bool string(string_t& text) override {
    if (!is_field_) return value("a string");
    is_field_ = false;
    if (text_) {
      fail(ExitCode::kData, "{}: the line's object has two fields {}; keep one", place_,
           quoted(name_));
    }
    text_ = std::move(text);
    return true;
  }
  bool start_object(std::size_t) override {
    if (depth_ > 0) value("an object");
    ++depth_;
    return true;
  }
  bool end_object() override { return --depth_, true; }
  bool start_array(std::size_t) override {
    value("an array");
    ++depth_;
    return true;
  }
  bool end_array() override { return --depth_, true; }
  bool key(string_t& key) override {
    is_field_ = depth_ == 1 && key == name_;
    return true;
  }
  bool parse_error(std::size_t byte, const std::string&,
                   const nlohmann::json::exception& error) override {
    constexpr int kNumberOverflow = 406;  // of the library, which ends there
    if (error.id == kNumberOverflow) {
      fail(ExitCode::kData,
           "{}: the number that ends at byte {} of the line is larger than a double can be; write "
           "it as a string, or remove the line",
           place_, byte);
    }
    // "[..] parse error at line 1, column 3: syntax error while .. - REASON; last read: '{x'"
    std::string reason = error.what();
    reason.erase(std::min(reason.find("; last read: "), reason.size()));
    const std::size_t dash = reason.find(" - "), mark = reason.find("] ");
    if (dash != std::string::npos) {
      reason.erase(0, dash + 3);
    } else if (mark != std::string::npos) {
      reason.erase(0, mark + 2);
    }
    reason.resize(std::min<std::size_t>(reason.size(), 100));
    fail(ExitCode::kData, "{}: byte {} of the line is not JSON: {}; correct or remove the line",
         place_, byte, printable(reason));
  }

 private:
  // A value that is not a string inside of the line's object.
  bool value(const char* kind) const {
    if (depth_ == 0) {
      fail(ExitCode::kData,
           "{}: the line is {}, not a JSON object with a field {}; correct or remove it", place_,
           kind, quoted(name_));
    }
    if (is_field_) {
      fail(ExitCode::kData, "{}: field {} is {}, not a string; correct or remove the line", place_,
           quoted(name_), kind);
    }
    return true;
  }

  const std::string &name_, &place_;
  std::optional<std::string> text_;
  std::int64_t depth_ = 0;
  bool is_field_ = false;  // the next value is that of the field
};

bool is_blank(std::string_view line) { return std::ranges::all_of(line, is_white_space); }

// The parts of a file between occurrences of a separator.
class SeparatedTexts {
 public:
  SeparatedTexts(TextFile file, std::string shown_path, const std::string& separator)
      : file_(std::move(file)),
        shown_path_(std::move(shown_path)),
        separator_(separator),
        takes_line_end_(!separator.starts_with('\n') && !separator.starts_with("\r\n") &&
                        !separator.ends_with('\n')) {}

  // The next part, valid until the next call; nullopt after the last. The end of the file, right
  // after a separator, is none.
  std::optional<std::string_view> next() {
    if (begin_ == buffer_.size() && !read_more()) return std::nullopt;
    if (number_ == 0) {
      constexpr std::size_t kMarkBytes = 16;  // at least the longest mark of a kind of file
      while (buffer_.size() < kMarkBytes && read_more()) {
      }
      require_not_packed(shown_path_, buffer_);
      if (buffer_.starts_with(kUtf8Mark)) begin_ = kUtf8Mark.size();
    } else if (takes_line_end_) {
      if (buffer_[begin_] == '\r' && begin_ + 1 == buffer_.size()) read_more();
      const std::string_view rest = std::string_view(buffer_).substr(begin_);
      begin_ += rest.starts_with("\r\n") ? 2 : rest.starts_with('\n') ? 1 : 0;
      if (begin_ == buffer_.size() && !read_more()) return std::nullopt;
    }
    ++number_;
    std::size_t found = buffer_.find(separator_, begin_);
    while (found == std::string::npos) {
      const std::size_t had = buffer_.size() - begin_;
      if (had > static_cast<std::size_t>(kMaxTextBytes)) {
        fail(ExitCode::kData,
             "{}: no {} in {} bytes, and at most {} may lie between two; is that the separator?",
             place(), quoted(separator_), had, kMaxTextBytes);
      }
      if (!read_more()) break;
      // The separator may lie across what was there before.
      found = buffer_.find(separator_, had - std::min(had, separator_.size() - 1));
    }
    const std::size_t end = std::min(found, buffer_.size());
    const std::string_view text = std::string_view(buffer_).substr(begin_, end - begin_);
    begin_ = std::min(end + separator_.size(), buffer_.size());
    return text;
  }
  static constexpr std::string_view kUnit = ", document ";
  std::string place() const { return fmt::format("{}{}{}", shown_path_, kUnit, number_); }
  std::int64_t number() const { return number_; }

 private:
  bool read_more() {
    constexpr std::size_t kReadBytes = 1 << 20;
    buffer_.erase(0, std::exchange(begin_, 0));
    const std::size_t had = buffer_.size();
    buffer_.resize(had + kReadBytes);
    buffer_.resize(had + file_.read_some(buffer_.data() + had, kReadBytes));
    return buffer_.size() > had;
  }

  TextFile file_;
  std::string shown_path_;
  const std::string& separator_;
  // A line end right after a separator belongs to it, unless it has line ends of its own.
  const bool takes_line_end_;
  std::string buffer_;
  std::size_t begin_ = 0;  // of the next part, in the buffer
  std::int64_t number_ = 0;
};

class TextReader {
 public:
  TextReader(const TextFormat& format, const std::function<void(const Document&)>& visit)
      : format_(format), visit_(visit) {}

  void read(const Document& file) {
    TextFile text(File::open_for_read(file.path, ExitCode::kData), file.shown_path);
    PartOfFile part(file);
    switch (format_.kind) {
      case TextFormat::kFiles:
        return whole(file, text);
      case TextFormat::kSeparator: {
        SeparatedTexts parts(std::move(text), file.shown_path, format_.name);
        while (const auto between = parts.next())
          add(part.of(*between, SeparatedTexts::kUnit, parts.number()));
        return;
      }
      case TextFormat::kLines:
      case TextFormat::kJsonLines: {
        TextLines lines(std::move(text), file.shown_path, kMaxTextBytes);
        while (const auto line = lines.next()) {
          if (format_.kind == TextFormat::kLines) {
            add(part.of(*line, TextLines::kUnit, lines.number()));
          } else if (!is_blank(*line)) {
            const std::string string = json_text(*line, format_.name, lines.place());
            add(part.of(string, TextLines::kUnit, lines.number()));
          }
        }
      }
    }
  }

  InputScan scan(InputScan files) { return counts_.scan(std::move(files)); }

 private:
  void whole(const Document& file, TextFile& text) {
    Document document = file;
    document.packed = text.is_packed();
    if (document.packed) {
      document.bytes = 0;
      std::vector<char> part(1 << 20);
      while (const std::size_t got = text.read_some(part.data(), part.size())) {
        document.bytes += static_cast<std::int64_t>(got);
      }
    }
    add(document);
  }

  void add(const Document& document) {
    if (counts_.add(document)) visit_(document);
  }

  const TextFormat& format_;
  const std::function<void(const Document&)>& visit_;
  DocumentCounts counts_;
};

}  // namespace

std::string describe(const TextFormat& format) {
  switch (format.kind) {
    case TextFormat::kFiles:
      return "files";
    case TextFormat::kLines:
      return "lines";
    case TextFormat::kSeparator:
      return "separator " + xxh3_hex(format.name.data(), format.name.size());
    case TextFormat::kJsonLines:
      return "JSON Lines " + format.name;
  }
  return "";
}

std::string json_text(std::string_view line, const std::string& name, const std::string& place) {
  FieldFinder finder(name, place);
  nlohmann::json::sax_parse(line, &finder);
  return finder.text();
}

InputScan for_each_text(const std::vector<InputPath>& paths, const std::string& except,
                        const TextFormat& format,
                        const std::function<void(const Document&)>& visit) {
  TextReader reader(format, visit);
  return reader.scan(
      for_each_document(paths, except, [&](const Document& file) { reader.read(file); }));
}

}  // namespace birkhoff
