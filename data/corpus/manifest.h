// manifest.json of a corpus: the message of configs/schema/corpus_manifest.proto, as JSON with a
// checksum (configs/loader/checksummed_json.h). It is checked as a whole before its values are used
// to allocate or open anything.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "configs/schema/corpus_manifest.pb.h"

namespace birkhoff {

inline constexpr char kCorpusManifestName[] = "manifest.json";

// Labels are u16.
inline constexpr int kMaxClasses = 65536;

// Whether the text can name a class: not empty, UTF-8, without control characters.
bool is_class_name(std::string_view text);
// The defect of a list of class names; empty if there is none. A list has at most kMaxClasses
// names, all valid and all different.
std::string class_names_defect(const google::protobuf::RepeatedPtrField<std::string>& names);

// Parses and validates a manifest, but not the files that it names. `name` is the name of the file
// in messages. Error(kData) names the first invalid field.
configs::CorpusManifest parse_corpus_manifest(const std::string& json, const std::string& name);

// A manifest of this version that is still empty.
configs::CorpusManifest new_manifest();
// Entries of the records of labels, of point sets and of images, without rows.
configs::CorpusManifest::Record label_record(const std::vector<std::string>& class_names);
configs::CorpusManifest::Record point_record(std::int64_t points, std::int64_t coordinates);
configs::CorpusManifest::Record image_record(std::int64_t rows, std::int64_t columns,
                                             std::int64_t channels);
// The name of the file of a shard. array: the name of its stream or record.
std::string shard_file_name(const std::string& split, const std::string& array,
                            std::int64_t number);

// Sets the fingerprint and returns the text of the file, checksum first. parse_corpus_manifest
// reads it back.
std::string manifest_json(configs::CorpusManifest manifest);

// The identity of a corpus, computed from everything but its source. See docs/corpus_format.md.
std::string manifest_fingerprint(const configs::CorpusManifest& manifest);

}  // namespace birkhoff
