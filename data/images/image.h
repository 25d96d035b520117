// An image in memory, and the form into which `birkhoff prepare` brings images.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace birkhoff {

// Longest side, and most pixels, of an image that is read.
inline constexpr std::int64_t kMaxImageSide = 1 << 16, kMaxImagePixels = 1 << 26;

struct ImageSize {
  std::int64_t rows = 0, columns = 0;
  bool operator==(const ImageSize&) const = default;
};

struct ImageShape {
  ImageSize size;
  int channels = 0;  // 1: gray; 3: red, green, blue
  bool operator==(const ImageShape&) const = default;
};

struct Image {
  ImageShape shape;
  std::vector<std::uint8_t> pixels;  // [rows, columns, channels]
};

// What does not say what to change stays as it is in the file.
struct ImageForm {
  std::optional<ImageSize> size;  // resized and cropped (data/images/resize.h)
  std::optional<int> channels;    // 1 or 3

  ImageShape of(const ImageShape& shape) const {
    return {size.value_or(shape.size), channels.value_or(shape.channels)};
  }
};

}  // namespace birkhoff
