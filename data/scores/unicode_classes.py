"""Writes unicode_classes.cpp: the ranges of three general categories of the Unicode database.

    pip install unicodedata2 && python data/scores/unicode_classes.py

The package has a newer database than Python itself, and the same one as the package `regex`, by
which sacreBLEU finds punctuation.
"""

import pathlib

import unicodedata2

ROW = 4  # ranges of a line


def ranges(category):
    """The first and last code points of each run of characters of a category."""
    runs = []
    for code_point in range(0x110000):
        if not unicodedata2.category(chr(code_point)).startswith(category):
            continue
        if runs and runs[-1][1] == code_point - 1:
            runs[-1][1] = code_point
        else:
            runs.append([code_point, code_point])
    return runs


def table(name, category):
    cells = [f"{{{first:#x}, {last:#x}}}," for first, last in ranges(category)]
    rows = ["    " + " ".join(cells[i : i + ROW]) for i in range(0, len(cells), ROW)]
    return [f"constexpr CodeRange {name}[] = {{"] + rows + ["};"]


def main():
    lines = [
        '#include "data/scores/unicode_classes.h"',
        "",
        "#include <algorithm>",
        "#include <iterator>",
        "",
        "namespace birkhoff {",
        "namespace {",
        "",
        "struct CodeRange {",
        "  std::uint32_t first, last;",
        "};",
        "",
        f"// Of Unicode {unicodedata2.unidata_version}, written by unicode_classes.py.",
        "// clang-format off",
    ]
    for name, category in [("kPunctuation", "P"), ("kNumber", "N"), ("kSymbol", "S")]:
        lines += table(name, category)
    lines += [
        "// clang-format on",
        "",
        "template <std::size_t kRanges>",
        "bool holds(const CodeRange (&ranges)[kRanges], std::uint32_t code_point) {",
        "  const auto range = std::lower_bound(",
        "      std::begin(ranges), std::end(ranges), code_point,",
        "      [](const CodeRange& entry, std::uint32_t wanted) { return entry.last < wanted; });",
        "  return range != std::end(ranges) && range->first <= code_point;",
        "}",
        "",
        "}  // namespace",
        "",
        "bool is_punctuation(std::uint32_t c) { return holds(kPunctuation, c); }",
        "bool is_number(std::uint32_t c) { return holds(kNumber, c); }",
        "bool is_symbol(std::uint32_t c) { return holds(kSymbol, c); }",
        "",
        "}  // namespace birkhoff",
        "",
    ]
    pathlib.Path(__file__).with_suffix(".cpp").write_text("\n".join(lines))


main()
