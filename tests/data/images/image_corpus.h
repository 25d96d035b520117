// Corpora of small images with a few classes, for tests of runs and commands.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cluster/base/files/file.h"
#include "configs/schema/corpus_manifest.pb.h"
#include "data/batch/image_dims.h"
#include "data/corpus/manifest.h"
#include "data/corpus/record_writer.h"
#include "data/corpus/shard_format.h"

namespace birkhoff {

// Writes splits train (48 images) and valid (10). Image i of a split has class i % classes, and
// gets brighter with it and from the top to the bottom.
inline void write_images(const std::string& folder, const ImageDims& shape, int classes = 3) {
  using configs::CorpusManifest;
  make_directory(folder);
  CorpusManifest manifest;
  manifest.set_format(shard_format::kManifestFormat);
  manifest.set_version(shard_format::kManifestVersion);
  for (const auto& [name, images] : {std::pair("train", 48), {"valid", 10}}) {
    CorpusManifest::Record image, label;
    image.set_name("image");
    image.set_dtype(CorpusManifest::u8);
    for (const std::int64_t size : {shape.rows, shape.columns, shape.channels}) {
      image.add_shape(size);
    }
    label.set_name("label");
    label.set_dtype(CorpusManifest::u16);
    for (int k = 0; k < classes; ++k) label.add_class_name("class " + std::to_string(k));
    RecordWriter image_writer(folder, name, image, /*shard_rows=*/20),
        label_writer(folder, name, label, /*shard_rows=*/20);
    for (int i = 0; i < images; ++i) {
      const auto of_image = static_cast<std::uint16_t>(i % classes);
      std::vector<std::uint8_t> values;
      for (std::int64_t v = 0; v < shape.values(); ++v) {
        const std::int64_t row = v / (shape.columns * shape.channels);
        values.push_back(
            static_cast<std::uint8_t>(of_image * 200 / classes + row * 8 + (i * 7 + v * v) % 5));
      }
      image_writer.append(values.data(), 1);
      label_writer.append(&of_image, 1);
    }
    auto& split = *manifest.add_split();
    split.set_name(name);
    split.mutable_counts()->set_documents(images);
    *split.add_record() = image_writer.finish();
    *split.add_record() = label_writer.finish();
  }
  write_file_durably(folder + "/" + kCorpusManifestName, manifest_json(manifest));
}

}  // namespace birkhoff
