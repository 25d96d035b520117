// Helpers for tests of records: entries of the manifest, changed manifests, and a corpus of images
// with labels and without text.
#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "data/corpus/corpus.h"
#include "data/corpus/manifest.h"
#include "data/corpus/record_writer.h"
#include "data/corpus/shard_format.h"
#include "tests/data/helpers.h"

namespace birkhoff {

inline configs::CorpusManifest::Record entry_of(const std::string& name,
                                                configs::CorpusManifest::Dtype dtype,
                                                const std::vector<std::int64_t>& shape = {}) {
  configs::CorpusManifest::Record entry;
  entry.set_name(name);
  entry.set_dtype(dtype);
  entry.mutable_shape()->Assign(shape.begin(), shape.end());
  return entry;
}

// Changes the manifest, and makes its fingerprint and checksum match.
inline void edit_manifest(const std::string& folder,
                          const std::function<void(configs::CorpusManifest&)>& edit) {
  configs::CorpusManifest manifest = Corpus(folder).manifest();
  edit(manifest);
  write_file_durably(folder + "/" + kCorpusManifestName, manifest_json(manifest));
}

// The bytes of `rows` rows; those of an f32 record are finite.
inline std::string random_rows(const configs::CorpusManifest::Record& entry, std::int64_t rows,
                               unsigned seed) {
  std::mt19937 random(seed);
  std::string bytes(static_cast<std::size_t>(rows * shard_format::row_bytes(entry)), '\0');
  for (char& byte : bytes) byte = static_cast<char>(random() % 127);
  return bytes;
}

// Makes a corpus of one split of records: images u8 [height, 5, 3], points f32 [7, 3], and labels.
// Returns the bytes of the images.
inline std::string write_image_corpus(const std::string& folder, std::int64_t rows,
                                      std::int64_t shard_rows, std::int64_t height = 4,
                                      unsigned seed = 1) {
  make_directory(folder);
  configs::CorpusManifest::Record label = entry_of("label", configs::CorpusManifest::u16);
  label.add_class_name("cat");
  label.add_class_name("dog");
  std::vector<std::uint16_t> labels;
  for (std::int64_t i = 0; i < rows; ++i) labels.push_back(i % 3 == 0 ? 1 : 0);
  const auto image = entry_of("image", configs::CorpusManifest::u8, {height, 5, 3});
  const auto points = entry_of("points", configs::CorpusManifest::f32, {7, 3});
  const std::string pixels = random_rows(image, rows, seed);
  const std::string positions = random_rows(points, rows, seed + 1);

  configs::CorpusManifest manifest;
  manifest.set_format(shard_format::kManifestFormat);
  manifest.set_version(shard_format::kManifestVersion);
  auto& split = *manifest.add_split();
  split.set_name("train");
  split.mutable_counts()->set_documents(rows);
  const auto add = [&](const configs::CorpusManifest::Record& entry, const void* values) {
    RecordWriter writer(folder, "train", entry, shard_rows);
    writer.append(values, rows);
    *split.add_record() = writer.finish();
  };
  add(image, pixels.data());
  add(points, positions.data());
  add(label, labels.data());
  write_file_durably(folder + "/" + kCorpusManifestName, manifest_json(manifest));
  return pixels;
}

}  // namespace birkhoff
