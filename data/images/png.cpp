#include <png.h>

#include <csetjmp>
#include <cstring>
#include <string>

#include "cluster/base/error.h"
#include "data/images/picture.h"

namespace birkhoff {
namespace {

// Everything that needs a destructor, which libpng's longjmp out of its functions would skip.
struct PngFile {
  ~PngFile() { png_destroy_read_struct(&png, &info, nullptr); }

  std::string_view rest;  // of the bytes
  std::string error;
  png_structp png = nullptr;
  png_infop info = nullptr;
  png_uint_32 columns = 0, rows = 0;
  std::size_t samples = 0;  // of a pixel, alpha included
  std::vector<std::uint8_t> values;
  std::vector<png_bytep> row_starts;
};

void on_error(png_structp png, png_const_charp message) {
  static_cast<PngFile*>(png_get_error_ptr(png))->error = message;
  png_longjmp(png, 1);
}

void ignore_warning(png_structp, png_const_charp) {}

void read_bytes(png_structp png, png_bytep out, png_size_t bytes) {
  auto& file = *static_cast<PngFile*>(png_get_io_ptr(png));
  if (bytes > file.rest.size()) png_error(png, "the file ends early");
  std::memcpy(out, file.rest.data(), bytes);
  file.rest.remove_prefix(bytes);
}

// These return false after an error of libpng.
bool read_header(PngFile& file) {
  if (setjmp(png_jmpbuf(file.png)) != 0) return false;
  png_set_read_fn(file.png, &file, read_bytes);
  png_set_user_limits(file.png, kMaxImageSide, kMaxImageSide);
  png_read_info(file.png, file.info);
  file.columns = png_get_image_width(file.png, file.info);
  file.rows = png_get_image_height(file.png, file.info);
  png_set_expand(file.png);    // palettes, gray of fewer than 8 bits, a transparent color
  png_set_scale_16(file.png);  // to 8 bits
  png_set_interlace_handling(file.png);
  png_read_update_info(file.png, file.info);
  file.samples = png_get_channels(file.png, file.info);
  return true;
}

bool read_rows(PngFile& file) {
  if (setjmp(png_jmpbuf(file.png)) != 0) return false;
  png_read_image(file.png, file.row_starts.data());
  png_read_end(file.png, nullptr);
  return true;
}

}  // namespace

bool is_png(std::string_view bytes) { return bytes.starts_with("\x89PNG\r\n\x1a\n"); }

Image read_png(std::string_view bytes, std::int64_t max_pixels) {
  PngFile file;
  file.rest = bytes;
  file.png = png_create_read_struct(PNG_LIBPNG_VER_STRING, &file, on_error, ignore_warning);
  require(file.png != nullptr, "libpng starts");
  file.info = png_create_info_struct(file.png);
  require(file.info != nullptr, "libpng has memory");
  reject_if(!read_header(file), "damaged PNG: {}", file.error);
  const std::int64_t rows = file.rows, columns = file.columns;
  reject_if(rows * columns > max_pixels, "{} x {} pixels are too many (at most {})", rows, columns,
            max_pixels);
  const std::size_t row_bytes = file.columns * file.samples;
  require(png_get_rowbytes(file.png, file.info) == row_bytes, "samples of a PNG have 8 bits");
  file.values.resize(file.rows * row_bytes);
  for (std::size_t row = 0; row < file.rows; ++row)
    file.row_starts.push_back(file.values.data() + row * row_bytes);
  reject_if(!read_rows(file), "damaged PNG: {}", file.error);

  const bool has_alpha = file.samples % 2 == 0;
  const std::size_t channels = file.samples - (has_alpha ? 1 : 0);
  Image image{{{rows, columns}, static_cast<int>(channels)}, {}};
  if (!has_alpha) {
    image.pixels = std::move(file.values);
    return image;
  }
  image.pixels.reserve(file.values.size() / file.samples * channels);
  for (auto pixel = file.values.begin(); pixel != file.values.end(); pixel += file.samples) {
    reject_if(pixel[channels] != 255,
              "has transparent pixels, whose color is undefined; put it on a background");
    image.pixels.insert(image.pixels.end(), pixel, pixel + channels);
  }
  return image;
}

}  // namespace birkhoff
