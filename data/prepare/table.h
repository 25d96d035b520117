// Tables as the input of `birkhoff prepare`: lines of columns, separated by tabs. Each row is a
// document, or a pair of documents, with a label. See docs/corpus_format.md, "Tables".
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "data/prepare/input/documents.h"
#include "data/prepare/prepare.h"

namespace birkhoff {

// Whether a column is given by its number, not by its name.
bool is_column_number(const std::string& column);

// Visits the rows of the files that for_each_document() finds, in order. A row's document has the
// name FILE:LINE, and holds its text, its second text (`partner`) and its label during the visit.
// The scan counts rows, and bytes of their text; its hash is the files'. One line is in memory at a
// time. Error(kUsage) for a column that a file does not have, Error(kData) for a row that cannot be
// used; both name file and line.
InputScan for_each_row(const std::vector<InputPath>& paths, const std::string& except,
                       const TableColumns& columns,
                       const std::function<void(const Document&)>& visit);

}  // namespace birkhoff
