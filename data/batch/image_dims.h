// The size of images whose values are u8 [rows, columns, channels], in that order.
#pragma once

#include <cstdint>

namespace birkhoff {

struct ImageDims {
  std::int64_t rows = 0, columns = 0, channels = 0;

  std::int64_t values() const { return rows * columns * channels; }
  friend bool operator==(const ImageDims&, const ImageDims&) = default;
};

}  // namespace birkhoff
