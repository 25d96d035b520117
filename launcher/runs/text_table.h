// A table for terminals: columns are as wide as their widest cell, whatever the cells hold. Local.
#pragma once

#include <string>
#include <vector>

namespace birkhoff {

struct TableColumn {
  std::string name;
  bool right = false;  // right-aligned, like numbers
};

// Each row has one cell per column. Put long names in the last column, where they shift no other
// column.
std::string text_table(const std::vector<TableColumn>& columns,
                       const std::vector<std::vector<std::string>>& rows);

}  // namespace birkhoff
