// The making of a corpus of records, for instance of images: a record of the rows and, if the input
// has classes, a record `label`. See docs/corpus_format.md, "Images" and "Point sets".
#pragma once

#include <functional>
#include <memory>

#include "data/prepare/prepare.h"
#include "data/prepare/records/record_input.h"

namespace birkhoff {

class ProcessGroup;

// As prepare_corpus(); of `options`, it takes the output folder, the paths, the fractions and the
// class names. The same command keeps the shards that an earlier one has finished. Error(kData)
// names the first file that cannot be read, unless records.skip_damaged; Error(kUsage) a row of
// another form than the first one, or without a class if others have one.
//
// ranks: if not null, they divide the shards among them; collective over them. The bytes are those
// of one rank. The result is rank 0's, and `progress` is called with what a rank itself reads.
PrepareResult prepare_records(
    const PrepareOptions& options, const RecordOptions& records, const RecordNouns& nouns,
    const std::function<std::unique_ptr<RecordInput>(const RecordInput::Context&)>& make_input,
    const std::function<void(const PrepareProgress&)>& progress, ProcessGroup* ranks);

}  // namespace birkhoff
