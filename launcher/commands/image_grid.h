// A picture of many small images, as a PNG file.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/batch/image_dims.h"

namespace birkhoff {

// The numbers of channels that a PNG can show: gray, or red, green and blue.
bool png_has_channels(std::int64_t channels);

// Writes images of one shape, each u8 [rows, columns, channels], row by row into a grid of
// `columns` columns, with gray lines between them. Error(kStorage) if the file cannot be written.
void write_image_grid(const std::string& path, const std::vector<std::vector<std::uint8_t>>& images,
                      const ImageDims& shape, std::int64_t columns);

}  // namespace birkhoff
