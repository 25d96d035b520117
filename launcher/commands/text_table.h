// A table for terminals: columns as wide as their widest cell, whatever the cells hold. Local.
#pragma once

#include <string>
#include <vector>

namespace birkhoff {

struct TableColumn {
  std::string name;
  bool right = false;  // its cells end in one line, as numbers do
};

// Rows have a cell for each column. Names that are long belong into the last column: nothing stands
// after it that they could push away.
std::string text_table(const std::vector<TableColumn>& columns,
                       const std::vector<std::vector<std::string>>& rows);

}  // namespace birkhoff
