// Aligned files as the input of `birkhoff prepare`: line i of a file of sources and line i of a
// file of targets are a pair. See docs/corpus_format.md, "Pairs".
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "data/prepare/input/documents.h"

namespace birkhoff {

// Visits the pairs of the files, each of which has an InputPath::source, in order. A pair's
// document is its target, whose `source` is the document of its source; both have the names
// FILE:LINE, and their text during the visit. Pairs of two blank lines are left out and counted.
// The scan counts pairs, and bytes of their texts; its hash is the files'. Two lines are in memory
// at a time. Error(kData) if one line of a pair is blank, or if a file has more lines than the
// other one; it names both lines.
InputScan for_each_pair(const std::vector<InputPath>& paths, const std::string& except,
                        const std::function<void(const Document&)>& visit);

}  // namespace birkhoff
