// Images of a record, with their labels if these are asked for: the samples of models of images.
// Sample i is image i of the split.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "data/batch/image_dims.h"
#include "data/corpus/corpus.h"
#include "data/loader/sample_source.h"

namespace birkhoff {

struct ImageRecordOptions {
  std::string split = "train";
  std::string image = "image";  // the record of the images
  std::string label{};          // the record of the labels; empty: none are read
  // Training: changes of each image, drawn by image_change().
  std::int64_t shift = 0;
  bool flip = false;
  std::uint64_t seed = 0;
};

// A change of an image: mirrored left to right, then moved. What moves in from outside is 0.
struct ImageChange {
  bool flipped = false;
  std::int64_t down = 0, right = 0;  // in pixels

  friend bool operator==(const ImageChange&, const ImageChange&) = default;
};

// The change of a sample in an epoch: a function of (seed, epoch, sample). Down and right are
// uniform in [-shift, shift]; with `flip` half of the images are mirrored.
ImageChange image_change(const ImageRecordOptions& options, std::int64_t epoch,
                         std::int64_t sample);

// The changed image. `image` and `out` have shape.values() values each and do not overlap.
void change_image(const ImageChange& change, const ImageDims& shape, const std::uint8_t* image,
                  std::uint8_t* out);

// The shape of a record's images. Error(kData) unless they are u8 [rows, columns, channels].
ImageDims image_dims(const Corpus& corpus, const std::string& split, const std::string& record);

// Batches have images and, with a label, labels (data/batch/batch.h). Error(kData) if the split
// lacks them or has no image.
std::unique_ptr<SampleSource> image_records(const Corpus& corpus,
                                            const ImageRecordOptions& options);

// Finds the errors of image_records() without opening any file of the corpus.
void check_image_records(const Corpus& corpus, const ImageRecordOptions& options);

}  // namespace birkhoff
