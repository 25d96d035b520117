// Generates images from a pixel model: the part of `birkhoff sample` for models of images.
#pragma once

#include <ostream>

#include "data/batch/image_dims.h"
#include "launcher/commands.h"
#include "launcher/runs/model_ranks.h"
#include "runtime/checkpoint/checkpoint.h"

namespace birkhoff {

// Writes arguments.png: a square grid of images, or with arguments.complete a row for each image of
// a split, with its given part, the model's completion and the image itself. Collective over the
// world.
void sample_images(const SampleArguments& arguments, const CheckpointFolder& checkpoint,
                   const ImageDims& shape, const ModelRank& rank, std::ostream& out,
                   std::ostream& err);

}  // namespace birkhoff
