// Properties of reading tables: random rows come back as they were written, whatever their size,
// columns and line ends, and damage is named with its line.
#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <string>
#include <vector>

#include "data/prepare/classes.h"
#include "data/prepare/table.h"
#include "tests/data/helpers.h"

namespace birkhoff {
namespace {

using Row = std::vector<std::string>;

// Any bytes but tabs and line ends; mostly short, sometimes long.
rc::Gen<std::string> values() {
  return rc::gen::exec([] {
    auto value = *rc::gen::container<std::string>(rc::gen::suchThat(
        rc::gen::arbitrary<char>(), [](char c) { return c != '\t' && c != '\n' && c != '\r'; }));
    const int repeats = *rc::gen::weightedElement<int>({{40, 0}, {10, 100}, {1, 25000}});
    for (int i = 0; i < repeats; ++i) value += "0123456";
    return value;
  });
}

struct Table {
  std::vector<Row> rows;
  std::size_t text = 0, label = 0;  // columns
  std::vector<std::string> ends;    // of the lines
};

rc::Gen<Table> tables() {
  return rc::gen::exec([] {
    Table table;
    const auto columns = *rc::gen::inRange<std::size_t>(2, 6);
    table.text = *rc::gen::inRange<std::size_t>(0, columns);
    table.label = (table.text + *rc::gen::inRange<std::size_t>(1, columns)) % columns;
    for (int i = *rc::gen::inRange(1, 12); i > 0; --i) {
      Row row;
      for (std::size_t column = 0; column < columns; ++column) row.push_back(*values());
      // No file begins like a compressed one, or with a mark that is dropped.
      if (table.rows.empty()) row[0].insert(0, "a");
      if (row[table.text].empty()) row[table.text] = "text";
      row[table.label] = *rc::gen::element<std::string>("0", "1", "yes and no", "\u00fc");
      table.rows.push_back(row);
      table.ends.push_back(*rc::gen::element<std::string>("\n", "\r\n"));
    }
    // Nothing, or a carriage return that belongs to no line feed, ends the last line as well.
    table.ends.back() = *rc::gen::element<std::string>("", "\n", "\r\n", "\r");
    if (table.label == 0) table.rows[0][0] = "a label";
    return table;
  });
}

std::string text_of(const Table& table) {
  std::string text;
  for (std::size_t i = 0; i < table.rows.size(); ++i)
    text += fmt::format("{}{}", fmt::join(table.rows[i], "\t"), table.ends[i]);
  return text;
}

TableColumns columns_of(const Table& table) {
  return {std::to_string(table.text + 1), std::to_string(table.label + 1)};
}

RC_GTEST_PROP(TableProperty, RowsComeBack, ()) {
  const Table table = *tables();
  static const TemporaryFolder folder;
  write_text(folder / "t.tsv", text_of(table));
  std::size_t next = 0;
  std::int64_t bytes = 0;
  const InputScan scan =
      for_each_row({{folder / "t.tsv"}}, "", columns_of(table), [&](const Document& row) {
        const Row& expected = table.rows.at(next++);
        RC_ASSERT(std::string(*row.text) == expected[table.text]);
        RC_ASSERT(std::string(row.label) == expected[table.label]);
        RC_ASSERT(row.name == fmt::format("t.tsv:{}", next));
        RC_ASSERT(row.shown_path == fmt::format("{}:{}", folder / "t.tsv", next));
        RC_ASSERT(row.bytes == static_cast<std::int64_t>(expected[table.text].size()));
        std::string parts;
        DocumentReader reader(row);
        for_each_chunk(reader, 0, row.bytes, 5, [&](std::string_view part, std::int64_t offset) {
          RC_ASSERT(offset == static_cast<std::int64_t>(parts.size()));
          parts += part;
        });
        RC_ASSERT(parts == expected[table.text]);
        bytes += row.bytes;
      });
  RC_ASSERT(next == table.rows.size());
  RC_ASSERT(scan.documents == static_cast<std::int64_t>(next));
  RC_ASSERT(scan.documents_of[kTrain] == scan.documents);
  RC_ASSERT(scan.bytes == bytes);
  RC_ASSERT(scan.input_bytes == std::vector<std::int64_t>{bytes});
}

RC_GTEST_PROP(TableProperty, ALineWithMoreOrFewerColumnsIsNamed, ()) {
  Table table = *tables();
  RC_PRE(table.rows.size() > 1);
  const auto bad = *rc::gen::inRange<std::size_t>(1, table.rows.size());
  if (*rc::gen::arbitrary<bool>()) {
    table.rows[bad].push_back(*values());
  } else {
    table.rows[bad].pop_back();
  }
  static const TemporaryFolder folder;
  write_text(folder / "t.tsv", text_of(table));
  std::size_t visited = 0;
  const std::string what = expect_error(ExitCode::kData, [&] {
    for_each_row({{folder / "t.tsv"}}, "", columns_of(table), [&](const Document&) { ++visited; });
  });
  RC_ASSERT(what.starts_with(fmt::format("{}:{}: the line has", folder / "t.tsv", bad + 1)));
  RC_ASSERT(visited == bad);
}

RC_GTEST_PROP(TableProperty, ClassesDoNotDependOnTheOrderOfRows, ()) {
  auto labels = *rc::gen::container<std::vector<std::string>>(rc::gen::oneOf(
      rc::gen::map(rc::gen::inRange(-20, 200), [](int i) { return std::to_string(i); }),
      rc::gen::element<std::string>("a", "B", "07")));
  labels.insert(labels.end(), {"3", "12"});
  const auto classes_of = [](const std::vector<std::string>& all) {
    Classes classes({});
    Document row;
    for (const std::string& label : all) {
      row.label = label;
      classes.add(row);
    }
    classes.finish("t.tsv");
    for (std::size_t i = 0; i < classes.names().size(); ++i) {
      row.label = classes.names()[i];
      RC_ASSERT(classes.value_of(row) == static_cast<std::int64_t>(i));
    }
    return classes.names();
  };
  const std::vector<std::string> names = classes_of(labels);
  std::reverse(labels.begin(), labels.end());
  RC_ASSERT(classes_of(labels) == names);
  const bool numbers = std::none_of(names.begin(), names.end(), [](const std::string& name) {
    return name == "a" || name == "B" || name == "07";
  });
  RC_ASSERT(
      std::is_sorted(names.begin(), names.end(), [&](const std::string& a, const std::string& b) {
        return numbers ? std::stoi(a) < std::stoi(b) : a < b;
      }));
}

}  // namespace
}  // namespace birkhoff
