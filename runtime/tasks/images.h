// Tasks whose samples are images: a check of the number of tokens, and synthetic images.
#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>
#include <string>

#include "configs/schema/config.pb.h"
#include "data/batch/batch.h"
#include "data/batch/image_dims.h"

namespace birkhoff {

// Checks that data.sequence_length is `tokens`, the number of tokens of an image. what: a clause
// for the message that says where this number comes from. Error(kConfig).
void check_length(const configs::Config& config, std::int64_t tokens, const std::string& what);

// The shape of an image of `area` pixels: of all rectangles, the one that is closest to a square.
ImageDims shape_of_area(std::int64_t area, std::int64_t channels);

// A batch of train.global_batch images of values from the generator, on the CPU or the meta device.
Batch synthetic_images(const configs::Config& config, const ImageDims& shape,
                       const at::Generator& generator, at::Device device);

}  // namespace birkhoff
