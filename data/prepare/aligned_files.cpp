#include "data/prepare/aligned_files.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "cluster/base/text/plural.h"
#include "cluster/base/text/utf8.h"
#include "data/text/text_lines.h"

namespace birkhoff {
namespace {

bool is_blank(std::string_view line) { return std::ranges::all_of(line, is_white_space); }

// The lines of one of two aligned files.
class Side {
 public:
  explicit Side(const Document& file)
      : lines_(File::open_for_read(file.path, ExitCode::kData), file.shown_path),
        path_(file.shown_path),
        part_(file) {}

  // Returns false after the last line.
  bool next() {
    line_ = lines_.next();
    return line_.has_value();
  }
  bool is_blank() const { return birkhoff::is_blank(*line_); }
  std::string place() const { return lines_.place(); }
  const std::string& path() const { return path_; }
  std::int64_t number() const { return lines_.number(); }
  // With the text of the line, or without.
  Document& document(bool is_empty = false) {
    return part_.of(is_empty ? std::string_view() : *line_, TextLines::kUnit, number());
  }

 private:
  TextLines lines_;
  std::string path_;
  PartOfFile part_;
  std::optional<std::string_view> line_;
};

[[noreturn]] void fail_as_longer(const Side& longer, const Side& shorter) {
  const std::int64_t lines = shorter.number() - 1;
  fail(ExitCode::kData,
       "{}: has no partner: {} ends after {}; line i of one file belongs to line i of the other, "
       "so give files with the same number of lines",
       longer.place(), shorter.path(), counted(lines, "line"));
}

}  // namespace

InputScan for_each_pair(const std::vector<InputPath>& paths, const std::string& except,
                        const std::function<void(const Document&)>& visit) {
  DocumentCounts counts;
  const auto read = [&](const Document& file) {
    Side source(*file.partner), target(file);
    for (;;) {
      const bool has_source = source.next(), has_target = target.next();
      if (has_source && !has_target) fail_as_longer(source, target);
      if (has_target && !has_source) fail_as_longer(target, source);
      if (!has_source) return;
      const bool blank_source = source.is_blank(), blank_target = target.is_blank();
      if (blank_source != blank_target) {
        fail(ExitCode::kData,
             "{}: the line is blank, but its partner {} is not; remove both, or give it a text",
             (blank_source ? source : target).place(), (blank_source ? target : source).place());
      }
      Document& document = target.document(blank_target);
      document.partner = &source.document(blank_source);
      document.is_whole = true;
      if (counts.add(document)) visit(document);
    }
  };
  return counts.scan(for_each_document(paths, except, read));
}

}  // namespace birkhoff
