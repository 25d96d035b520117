#include "runtime/tasks/images.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/randint.h>
#include <fmt/format.h>

#include "cluster/base/error.h"

namespace birkhoff {

void check_length(const configs::Config& config, std::int64_t tokens, const std::string& what) {
  if (config.data().sequence_length() == tokens) return;
  fail(ExitCode::kConfig, "data.sequence_length: is {}, but {}; set it to {}",
       config.data().sequence_length(), what, tokens);
}

ImageDims shape_of_area(std::int64_t area, std::int64_t channels) {
  std::int64_t rows = 1;
  for (std::int64_t i = 1; i * i <= area; ++i) {
    if (area % i == 0) rows = i;
  }
  return {rows, area / rows, channels};
}

Batch synthetic_images(const configs::Config& config, const ImageDims& shape,
                       const at::Generator& generator, at::Device device) {
  const std::int64_t size = config.train().global_batch();
  Batch batch;
  batch.fields.emplace(
      field::kImages, at::randint(256, {size, shape.rows, shape.columns, shape.channels}, generator,
                                  at::TensorOptions(at::kByte).device(device)));
  batch.sample_ids_B = at::arange(size, at::TensorOptions(at::kLong).device(device));
  return batch;
}

}  // namespace birkhoff
