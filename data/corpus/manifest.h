// manifest.json of a corpus: configs/corpus_manifest.proto as configs/sealed_json.h writes it,
// checked as a whole before anything is allocated or opened by its numbers.
#pragma once

#include <filesystem>
#include <string>

#include "configs/corpus_manifest.pb.h"

namespace birkhoff {

inline constexpr char kCorpusManifestName[] = "manifest.json";

// Parses and validates, except for the files it names. `name` stands for the file in messages.
// Error(kData) names the first field that is wrong.
configs::CorpusManifest parse_corpus_manifest(const std::string& json, const std::string& name);

// The text of the file, its checksum first; parse_corpus_manifest reads it back. Sets the
// fingerprint.
std::string manifest_json(configs::CorpusManifest manifest);

// The identity of a corpus, from everything but the source. docs/corpus_format.md.
std::string manifest_fingerprint(const configs::CorpusManifest& manifest);

}  // namespace birkhoff
