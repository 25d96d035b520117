#include "launcher/commands/image_grid.h"

#include <png.h>

#include <algorithm>
#include <string_view>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"

namespace birkhoff {

bool png_has_channels(std::int64_t channels) { return channels == 1 || channels == 3; }

void write_image_grid(const std::string& path, const std::vector<std::vector<std::uint8_t>>& images,
                      const ImageDims& shape, std::int64_t columns) {
  require(!images.empty() && columns >= 1 && png_has_channels(shape.channels), "images of a grid");
  constexpr std::int64_t kGap = 1;
  constexpr std::uint8_t kGray = 128;
  const std::int64_t rows = (std::ssize(images) + columns - 1) / columns;
  const std::int64_t height = rows * (shape.rows + kGap) - kGap,
                     width = columns * (shape.columns + kGap) - kGap;
  std::vector<std::uint8_t> picture(static_cast<std::size_t>(height * width * shape.channels),
                                    kGray);
  const std::int64_t row_bytes = shape.columns * shape.channels;
  for (std::int64_t i = 0; i < std::ssize(images); ++i) {
    const std::vector<std::uint8_t>& image = images[static_cast<std::size_t>(i)];
    require(std::ssize(image) == shape.values(), "an image of the grid has its shape");
    const std::int64_t top = i / columns * (shape.rows + kGap),
                       left = i % columns * (shape.columns + kGap);
    for (std::int64_t y = 0; y < shape.rows; ++y) {
      std::copy_n(image.begin() + y * row_bytes, row_bytes,
                  picture.begin() + ((top + y) * width + left) * shape.channels);
    }
  }

  png_image png{};
  png.version = PNG_IMAGE_VERSION;
  png.width = static_cast<png_uint_32>(width);
  png.height = static_cast<png_uint_32>(height);
  png.format = shape.channels == 1 ? PNG_FORMAT_GRAY : PNG_FORMAT_RGB;
  png_alloc_size_t size = PNG_IMAGE_PNG_SIZE_MAX(png);
  std::string bytes(size, '\0');
  const int written = png_image_write_to_memory(&png, bytes.data(), &size, /*convert_to_8_bit=*/0,
                                                picture.data(), /*row_stride=*/0,
                                                /*colormap=*/nullptr);
  if (written == 0) fail(ExitCode::kStorage, "{}: libpng: {}", path, png.message);
  write_file_durably(path, std::string_view(bytes).substr(0, size));
}

}  // namespace birkhoff
