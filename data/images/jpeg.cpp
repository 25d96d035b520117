// jpeglib.h uses FILE, which it does not declare.
#include <cstdio>

#include <jerror.h>
#include <jpeglib.h>

#include <csetjmp>
#include <string>
#include <utility>

#include "cluster/base/error.h"
#include "data/images/picture.h"

namespace birkhoff {
namespace {

// Everything that needs a destructor, which a longjmp out of libjpeg's functions would skip.
struct JpegFile {
  JpegFile() {
    jpeg.err = jpeg_std_error(&errors);
    jpeg.client_data = this;
  }
  ~JpegFile() { jpeg_destroy_decompress(&jpeg); }

  jpeg_decompress_struct jpeg = {};
  jpeg_error_mgr errors = {};
  std::jmp_buf leave;
  std::string error;
  std::vector<std::uint8_t> values;
};

std::string message_of(j_common_ptr jpeg) {
  char text[JMSG_LENGTH_MAX];
  jpeg->err->format_message(jpeg, text);
  return text;
}

[[noreturn]] void on_error(j_common_ptr jpeg) {
  auto& file = *static_cast<JpegFile*>(jpeg->client_data);
  file.error = message_of(jpeg);
  std::longjmp(file.leave, 1);
}

// level: negative for a warning, else a trace.
void on_message(j_common_ptr jpeg, int level) {
  if (level >= 0) return;
  switch (jpeg->err->msg_code) {
    case JWRN_EXTRANEOUS_DATA:
    case JWRN_ADOBE_XFORM:
    case JWRN_JFIF_MAJOR:
    case JWRN_TOO_MUCH_DATA:
      return;  // the image is whole
    default:
      on_error(jpeg);
  }
}

// These return false after an error of libjpeg.
bool read_header(JpegFile& file, std::string_view bytes) {
  if (setjmp(file.leave) != 0) return false;
  jpeg_create_decompress(&file.jpeg);
  jpeg_mem_src(&file.jpeg, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size());
  jpeg_read_header(&file.jpeg, TRUE);
  return true;
}

bool read_rows(JpegFile& file, std::size_t row_bytes) {
  if (setjmp(file.leave) != 0) return false;
  jpeg_start_decompress(&file.jpeg);
  while (file.jpeg.output_scanline < file.jpeg.output_height) {
    JSAMPROW row = file.values.data() + file.jpeg.output_scanline * row_bytes;
    jpeg_read_scanlines(&file.jpeg, &row, 1);
  }
  jpeg_finish_decompress(&file.jpeg);
  return true;
}

}  // namespace

bool is_jpeg(std::string_view bytes) { return bytes.starts_with("\xff\xd8\xff"); }

Image read_jpeg(std::string_view bytes, std::int64_t max_pixels) {
  JpegFile file;
  file.errors.error_exit = on_error;
  file.errors.emit_message = on_message;
  reject_if(!read_header(file, bytes), "damaged JPEG: {}", file.error);
  const std::int64_t rows = file.jpeg.image_height, columns = file.jpeg.image_width;
  reject_if(rows * columns > max_pixels, "{} x {} pixels are too many (at most {})", rows, columns,
            max_pixels);
  const bool is_gray = file.jpeg.jpeg_color_space == JCS_GRAYSCALE;
  reject_if(!is_gray && file.jpeg.num_components != 3,
            "a JPEG of {} color components (CMYK); convert it to RGB", file.jpeg.num_components);
  file.jpeg.out_color_space = is_gray ? JCS_GRAYSCALE : JCS_RGB;
  file.jpeg.dct_method = JDCT_ISLOW;
  const int channels = is_gray ? 1 : 3;
  file.values.resize(static_cast<std::size_t>(rows * columns * channels));
  reject_if(!read_rows(file, static_cast<std::size_t>(columns * channels)), "damaged JPEG: {}",
            file.error);
  return {{{rows, columns}, channels}, std::move(file.values)};
}

Image read_picture(std::string_view bytes) {
  if (is_png(bytes)) return read_png(bytes);
  if (is_jpeg(bytes)) return read_jpeg(bytes);
  reject_if(bytes.empty(), "is empty");
  constexpr std::pair<const char*, const char*> kOthers[] = {
      {"GIF8", "GIF"}, {"BM", "BMP"}, {"RIFF", "WebP"}, {"II*", "TIFF"}, {"MM", "TIFF"}};
  for (const auto& [start, name] : kOthers)
    reject_if(bytes.starts_with(start), "is neither PNG nor JPEG, but {}; convert it", name);
  reject_if(true, "is neither PNG nor JPEG");
  return {};
}

}  // namespace birkhoff
