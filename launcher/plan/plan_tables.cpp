#include "launcher/plan/plan.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "launcher/measure/report.h"

namespace birkhoff {
namespace {

constexpr double kMaxWhole = 0x1p53;  // doubles up to here hold every integer

bool is_whole(double value) { return std::abs(value) < kMaxWhole && std::floor(value) == value; }

nlohmann::ordered_json number(const std::optional<double>& value) {
  if (!value || !std::isfinite(*value)) return nullptr;
  if (is_whole(*value)) return static_cast<std::int64_t>(*value);
  return *value;
}

}  // namespace

std::string table_text(const PlanTable& table) {
  std::vector<std::string> heads = {"part"};
  for (const PlanColumn& column : table.columns) heads.push_back(column.head);
  std::string text = table.title + "\n\n" + table_head(heads);
  for (const PlanRow& row : table.rows) {
    std::vector<std::string> cells = {row.part};
    for (std::size_t i = 0; i < row.values.size(); ++i) {
      cells.push_back(row.values[i] ? figure(*row.values[i] / table.columns[i].unit) : "");
    }
    text += table_row(cells);
  }
  return text;
}

nlohmann::ordered_json table_json(const PlanTable& table) {
  auto json = nlohmann::ordered_json::object();
  for (const PlanRow& row : table.rows) {
    std::string key = row.part;
    std::replace(key.begin(), key.end(), ' ', '_');
    for (std::size_t i = 0; i < row.values.size(); ++i) {
      json[key][table.columns[i].key] = number(row.values[i]);
    }
  }
  return json;
}

}  // namespace birkhoff
