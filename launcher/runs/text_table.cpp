#include "launcher/runs/text_table.h"

#include <algorithm>

#include "runtime/reporting/display_text.h"

namespace birkhoff {

std::string text_table(const std::vector<TableColumn>& columns,
                       const std::vector<std::vector<std::string>>& rows) {
  std::vector<std::vector<std::string>> lines(1);
  for (const TableColumn& column : columns) lines[0].push_back(column.name);
  lines.insert(lines.end(), rows.begin(), rows.end());
  std::vector<int> widths(columns.size(), 0);
  for (const auto& line : lines) {
    for (std::size_t i = 0; i < columns.size(); ++i) {
      widths[i] = std::max(widths[i], display_columns(line[i]));
    }
  }
  std::string text;
  for (const auto& line : lines) {
    std::string row;
    for (std::size_t i = 0; i < columns.size(); ++i) {
      const std::string blank(static_cast<std::size_t>(widths[i] - display_columns(line[i])), ' ');
      const std::string cell = display_text(line[i]);
      row += (i == 0 ? "" : "  ") + (columns[i].right ? blank + cell : cell + blank);
    }
    row.erase(row.find_last_not_of(' ') + 1);
    text += row + '\n';
  }
  return text;
}

}  // namespace birkhoff
