// The tables of a plan, as text and as JSON. Local.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace birkhoff {

struct PlanColumn {
  std::string key;   // in JSON
  std::string head;  // in text, with its unit
  double unit = 1;   // text shows values divided by this
};

struct PlanRow {
  std::string part;
  std::vector<std::optional<double>> values;  // one for each column; nullopt: does not apply
};

// One subject: a line for each of its parts.
struct PlanTable {
  std::string key;    // in JSON
  std::string title;  // in text, a sentence
  std::vector<PlanColumn> columns;
  std::vector<PlanRow> rows;

  void add(std::string part, std::vector<std::optional<double>> values) {
    rows.push_back({std::move(part), std::move(values)});
  }
};

// The title and a Markdown table.
std::string table_text(const PlanTable& table);

// {part: {column: value}}, with underscores in place of spaces; a value that does not apply is
// null, and whole numbers have no fraction.
nlohmann::ordered_json table_json(const PlanTable& table);

}  // namespace birkhoff
