#include "data/prepare/table.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "cluster/base/text/number_text.h"
#include "cluster/base/text/plural.h"
#include "configs/loader/message_text.h"
#include "data/corpus/manifest.h"
#include "data/text/text_lines.h"

namespace birkhoff {
namespace {

void split_at_tabs(std::string_view line, std::vector<std::string_view>& values) {
  values.clear();
  for (std::size_t tab = line.find('\t'); tab != std::string_view::npos; tab = line.find('\t')) {
    values.push_back(line.substr(0, tab));
    line.remove_prefix(tab + 1);
  }
  values.push_back(line);
}

// The index of a column in a file whose first line has these values. option: in messages.
std::size_t find_column(const std::string& column, const char* option,
                        const std::vector<std::string_view>& first, const std::string& place) {
  if (is_column_number(column)) {
    const std::size_t number = parse_number<std::size_t>(column).value_or(0);
    if (number >= 1 && number <= first.size()) return number - 1;
    fail(ExitCode::kUsage, "{}: {} {}: the line has {}; give a number from 1 to {}", place, option,
         column, counted(static_cast<std::int64_t>(first.size()), "column"), first.size());
  }
  const auto found = std::find(first.begin(), first.end(), column);
  if (found == first.end()) {
    std::vector<std::string> names;
    for (const std::string_view name : first) names.push_back(quoted(std::string(name)));
    fail(ExitCode::kUsage,
         "{}: {} {}: no such column; the line names {}. Without such a line, give the column's "
         "number",
         place, option, quoted(column), printable(fmt::format("{}", fmt::join(names, ", "))));
  }
  if (std::find(found + 1, first.end(), column) != first.end()) {
    fail(ExitCode::kUsage, "{}: {} {}: the line names it twice; give its number, and --header",
         place, option, quoted(column));
  }
  return static_cast<std::size_t>(found - first.begin());
}

class TableReader {
 public:
  TableReader(const TableColumns& columns, const std::function<void(const Document&)>& visit)
      : columns_(columns), visit_(visit) {}

  void read(const Document& file) {
    TextLines lines(File::open_for_read(file.path, ExitCode::kData), file.shown_path);
    std::optional<std::string_view> line = lines.next();
    if (!line) return;  // emptied since it was found: the pass reports that its hash changed
    split_at_tabs(*line, values_);
    num_columns_ = values_.size();
    text_ = find_column(columns_.text, "--text-column", values_, lines.place());
    label_ = find_column(columns_.label, "--label-column", values_, lines.place());
    require_different(lines, {"--text-column", columns_.text, text_},
                      {"--label-column", columns_.label, label_});
    if (has_second()) {
      second_ = find_column(columns_.second, "--second-column", values_, lines.place());
      const Column second{"--second-column", columns_.second, second_};
      require_different(lines, {"--text-column", columns_.text, text_}, second);
      require_different(lines, second, {"--label-column", columns_.label, label_});
    }
    if (columns_.header) line = lines.next();
    PartOfFile part(file), second_part(file);
    std::string blank;  // the location of the first empty line, which may end the file
    for (; line; line = lines.next()) {
      if (line->empty()) {
        if (blank.empty()) blank = lines.place();
        continue;
      }
      if (!blank.empty()) {
        fail(ExitCode::kData, "{}: the line is empty; remove it: only the end of a table may be",
             blank);
      }
      split_at_tabs(*line, values_);
      row(part, second_part, lines);
    }
  }

  // The rows that were read, as for_each_row() returns them. files: the scan of the same files.
  InputScan scan(InputScan files) const { return rows_.scan(std::move(files)); }

 private:
  struct Column {
    const char* option;
    const std::string& given;
    std::size_t index;
  };
  static void require_different(const TextLines& lines, const Column& a, const Column& b) {
    if (a.index != b.index) return;
    fail(ExitCode::kUsage, "{}: {} {} and {} {} are the same column", lines.place(), a.option,
         quoted(a.given), b.option, quoted(b.given));
  }

  bool has_second() const { return !columns_.second.empty(); }

  std::string_view text_of(std::size_t column, const TextLines& lines) const {
    if (values_[column].empty()) {
      fail(ExitCode::kData, "{}: the text (column {}) is empty; remove the row or give it a text",
           lines.place(), column + 1);
    }
    return values_[column];
  }

  // The values of a row are in values_.
  void row(PartOfFile& part, PartOfFile& second_part, const TextLines& lines) {
    if (values_.size() != num_columns_) {
      fail(ExitCode::kData,
           "{}: the line has {}, line 1 has {}; columns are separated by tabs, which texts cannot "
           "hold",
           lines.place(), counted(static_cast<std::int64_t>(values_.size()), "column"),
           num_columns_);
    }
    const std::string_view text = text_of(text_, lines), label = values_[label_];
    if (label.empty()) {
      fail(ExitCode::kData, "{}: the label (column {}) is empty; remove the row or give it a label",
           lines.place(), label_ + 1);
    }
    if (!is_class_name(label)) {
      fail(ExitCode::kData,
           "{}: the label {} (column {}) is not UTF-8 or holds control characters; is that the "
           "label column?",
           lines.place(), quoted(std::string(label)), label_ + 1);
    }
    Document& document = part.of(text, TextLines::kUnit, lines.number());
    document.label = label;
    document.is_whole = true;
    if (has_second()) {
      Document& second = second_part.of(text_of(second_, lines), TextLines::kUnit, lines.number());
      second.label = label;
      document.partner = &second;
    }
    if (rows_.add(document)) visit_(document);
  }

  const TableColumns& columns_;
  const std::function<void(const Document&)>& visit_;
  DocumentCounts rows_;
  // Of the current file.
  std::size_t num_columns_ = 0, text_ = 0, label_ = 0, second_ = 0;
  std::vector<std::string_view> values_;  // of the current line
};

}  // namespace

bool is_column_number(const std::string& column) {
  return !column.empty() && column.find_first_not_of("0123456789") == std::string::npos;
}

InputScan for_each_row(const std::vector<InputPath>& paths, const std::string& except,
                       const TableColumns& columns,
                       const std::function<void(const Document&)>& visit) {
  TableReader reader(columns, visit);
  return reader.scan(
      for_each_document(paths, except, [&](const Document& file) { reader.read(file); }));
}

}  // namespace birkhoff
