// The source of a corpus, which `prepare` records: the same source yields the same corpus. Shared
// by text and records.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cluster/base/collectives/process_group.h"
#include "configs/schema/corpus_manifest.pb.h"
#include "data/prepare/input/documents.h"
#include "data/prepare/out_folder.h"
#include "data/prepare/prepare.h"

namespace birkhoff {

// All paths of the options, with their splits.
std::vector<InputPath> inputs_of(const PrepareOptions& options);

// Error(kUsage) about the first path that is standard input or a pipe, which is read once.
void require_no_streams(const std::vector<InputPath>& inputs, const std::string& why);

// Whether rank 0 says that the corpus is finished. Error(kData) if a rank's input is not rank 0's.
// input: identifies it, in one line. what: "text", "images". Collective.
bool agree_on_input(ProcessGroup& ranks, const std::string& input, bool is_finished,
                    const char* what);

// The shares of the splits, as the source records them: "valid 0.1, test given".
std::string shares_text(const PrepareOptions& options);

// Requires documents for train, and for each split that has its own paths. what: "text", "images".
void require_documents(const InputScan& scan, const PrepareOptions& options, const char* what);

// Error(kUsage) about a split that has a fraction or paths but got none of the documents.
[[noreturn]] void fail_as_empty(SplitIndex split, const std::string& first_path,
                                const std::string& of_what, const PrepareOptions& options);

// Error(kUsage) if the folder holds a corpus made from another source, unless `same_content` says
// that only the times of the files differ. what: "text", "images". why_no_hash: why a corpus may
// record these times and not what is in the files.
void require_same(const OutFolder& folder, const configs::CorpusManifest::Source& source,
                  const char* what, const std::string& why_no_hash,
                  const std::function<bool(const configs::CorpusManifest::Source&)>& same_content);

}  // namespace birkhoff
