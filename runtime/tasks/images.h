// Images as samples of tasks: checks of their size, and synthetic ones.
#pragma once

#include <cstdint>
#include <string>

#include "configs/schema/config.pb.h"
#include "data/batch/batch.h"
#include "data/batch/image_dims.h"

namespace birkhoff {

// Checks that data.sequence_length is `tokens`, the number of tokens of an image. what: that number
// in words. Error(kConfig).
void check_length(const configs::Config& config, std::int64_t tokens, const std::string& what);

// An image of `area` pixels: a square, or else the rectangle that is closest to one.
ImageDims shape_of_area(std::int64_t area, std::int64_t channels);

// A batch of train.global_batch images of random values, on the CPU or the meta device. Depends
// only on train.seed.
Batch synthetic_images(const configs::Config& config, const ImageDims& shape, at::Device device);

}  // namespace birkhoff
