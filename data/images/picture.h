// Files of one image: PNG and JPEG. The libraries that parse them may crash on damaged files, so
// the product calls these functions in a child process (data/images/image_decoder.h).
#pragma once

#include <string_view>

#include "data/images/image.h"

namespace birkhoff {

// Whether the bytes begin like a PNG or JPEG file.
bool is_png(std::string_view bytes);
bool is_jpeg(std::string_view bytes);

// The image, with the values of the file: color profiles, gamma and orientation are not applied.
// std::invalid_argument says why it cannot be read. max_pixels: it may not have more.
//
// Palettes become red, green and blue; gray of 1, 2 or 4 bits is scaled to 8, and 16 bits to 8. An
// alpha channel must be opaque everywhere.
Image read_png(std::string_view bytes, std::int64_t max_pixels = kMaxImagePixels);
// Baseline and progressive, gray or color (not CMYK), by the exact integer transform. Data that are
// lost are an error; bytes between segments are not.
Image read_jpeg(std::string_view bytes, std::int64_t max_pixels = kMaxImagePixels);
// One of the two.
Image read_picture(std::string_view bytes);

}  // namespace birkhoff
