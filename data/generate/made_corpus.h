// The frame of the generators: an output folder, and a manifest written last.
#pragma once

#include <functional>
#include <string>

#include "configs/schema/corpus_manifest.pb.h"
#include "data/prepare/out_folder.h"

namespace birkhoff {

// Makes the corpus out/ if the folder does not already hold it; returns false if it does. options:
// identify the content, as the source of the manifest. fill: writes the shards and adds the splits
// to the manifest. Error(kUsage) if the folder holds something else.
bool make_corpus(
    const std::string& out, const std::string& options,
    const std::function<void(const OutFolder&, configs::CorpusManifest& manifest)>& fill);

}  // namespace birkhoff
