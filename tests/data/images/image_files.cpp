#include "tests/data/images/image_files.h"

#include <cstdio>

#include <fmt/format.h>
#include <jpeglib.h>
#include <png.h>

#include <cstdlib>
#include <stdexcept>

#include "tests/data/text/packed_bytes.h"

namespace birkhoff {
namespace {

void append_little(std::string& bytes, std::uint64_t value, int width) {
  for (int i = 0; i < width; ++i) bytes += static_cast<char>(value >> (8 * i));
}

std::string big_endian_of(std::initializer_list<std::int64_t> values) {
  std::string bytes;
  for (const std::int64_t value : values) {
    for (int shift = 24; shift >= 0; shift -= 8) bytes += static_cast<char>(value >> shift);
  }
  return bytes;
}

// All red, then all green, then all blue values.
std::string planes_of(const Image& image) {
  std::string planes;
  for (std::size_t c = 0; c < 3; ++c) {
    for (std::size_t i = c; i < image.pixels.size(); i += 3)
      planes += static_cast<char>(image.pixels[i]);
  }
  return planes;
}

}  // namespace

Image pattern(std::int64_t rows, std::int64_t columns, int channels, int seed) {
  Image image{{{rows, columns}, channels}, {}};
  for (std::int64_t i = 0; i < rows * columns * channels; ++i)
    image.pixels.push_back(static_cast<std::uint8_t>((i * i * 7 + i * 131 + seed) % 257 % 256));
  return image;
}

std::string png_of(const Image& image) {
  return png_of({image.shape.channels == 1 ? PNG_COLOR_TYPE_GRAY : PNG_COLOR_TYPE_RGB, 8},
                image.shape.size.rows, image.shape.size.columns, image.pixels);
}

std::string png_of(const PngKind& kind, std::int64_t rows, std::int64_t columns,
                   const std::vector<std::uint8_t>& values) {
  std::string bytes;
  png_structp png = png_create_write_struct(PNG_LIBPNG_VER_STRING, nullptr, nullptr, nullptr);
  png_infop info = png_create_info_struct(png);
  if (setjmp(png_jmpbuf(png)) != 0) std::abort();
  png_set_write_fn(
      png, &bytes,
      [](png_structp to, png_bytep data, png_size_t size) {
        static_cast<std::string*>(png_get_io_ptr(to))
            ->append(reinterpret_cast<const char*>(data), size);
      },
      nullptr);
  png_set_IHDR(png, info, static_cast<png_uint_32>(columns), static_cast<png_uint_32>(rows),
               kind.bit_depth, kind.color_type,
               kind.interlaced ? PNG_INTERLACE_ADAM7 : PNG_INTERLACE_NONE,
               PNG_COMPRESSION_TYPE_DEFAULT, PNG_FILTER_TYPE_DEFAULT);
  if (!kind.palette.empty()) {
    png_set_PLTE(png, info, reinterpret_cast<png_const_colorp>(kind.palette.data()),
                 static_cast<int>(kind.palette.size() / 3));
  }
  if (!kind.transparency.empty()) {
    png_set_tRNS(png, info, kind.transparency.data(), static_cast<int>(kind.transparency.size()),
                 nullptr);
  }
  png_write_info(png, info);
  const std::size_t row_bytes = values.size() / static_cast<std::size_t>(rows);
  std::vector<png_bytep> starts;
  for (std::size_t row = 0; row < static_cast<std::size_t>(rows); ++row)
    starts.push_back(const_cast<png_bytep>(values.data()) + row * row_bytes);
  png_write_image(png, starts.data());
  png_write_end(png, info);
  png_destroy_write_struct(&png, &info);
  return bytes;
}

std::string jpeg_of(const Image& image, int quality, bool progressive) {
  jpeg_compress_struct jpeg = {};
  jpeg_error_mgr errors;
  jpeg.err = jpeg_std_error(&errors);
  jpeg_create_compress(&jpeg);
  unsigned char* out = nullptr;
  unsigned long size = 0;
  jpeg_mem_dest(&jpeg, &out, &size);
  jpeg.image_width = static_cast<JDIMENSION>(image.shape.size.columns);
  jpeg.image_height = static_cast<JDIMENSION>(image.shape.size.rows);
  jpeg.input_components = image.shape.channels;
  jpeg.in_color_space = image.shape.channels == 1   ? JCS_GRAYSCALE
                        : image.shape.channels == 3 ? JCS_RGB
                                                    : JCS_CMYK;
  jpeg_set_defaults(&jpeg);
  jpeg_set_quality(&jpeg, quality, TRUE);
  if (jpeg.in_color_space == JCS_RGB)  // color in full resolution
    jpeg.comp_info[0].h_samp_factor = jpeg.comp_info[0].v_samp_factor = 1;
  if (progressive) jpeg_simple_progression(&jpeg);
  jpeg_start_compress(&jpeg, TRUE);
  const std::size_t row_bytes =
      static_cast<std::size_t>(image.shape.size.columns * image.shape.channels);
  while (jpeg.next_scanline < jpeg.image_height) {
    JSAMPROW row = const_cast<std::uint8_t*>(image.pixels.data()) + jpeg.next_scanline * row_bytes;
    jpeg_write_scanlines(&jpeg, &row, 1);
  }
  jpeg_finish_compress(&jpeg);
  jpeg_destroy_compress(&jpeg);
  std::string bytes(reinterpret_cast<const char*>(out), size);
  std::free(out);
  return bytes;
}

std::string idx_images_of(const std::vector<Image>& images) {
  const auto [rows, columns] = images.at(0).shape.size;
  std::string bytes = big_endian_of({0x803, std::ssize(images), rows, columns});
  for (const Image& image : images) bytes.append(image.pixels.begin(), image.pixels.end());
  return bytes;
}

std::string idx_labels_of(const std::vector<int>& labels) {
  std::string bytes = big_endian_of({0x801, std::ssize(labels)});
  for (const int label : labels) bytes += static_cast<char>(label);
  return bytes;
}

std::string cifar_of(const std::vector<Image>& images,
                     const std::vector<std::vector<int>>& labels) {
  std::string bytes;
  for (std::size_t i = 0; i < images.size(); ++i) {
    for (const int label : labels.at(i)) bytes += static_cast<char>(label);
    bytes += planes_of(images[i]);
  }
  return bytes;
}

std::string zip_of(const std::map<std::string, std::string>& entries, bool deflated, bool damage) {
  std::string bytes, directory;
  for (const auto& [name, content] : entries) {
    const std::string packed = deflated ? deflate_of(content, -MAX_WBITS) : content;
    std::uint64_t crc =
        crc32(0, reinterpret_cast<const Bytef*>(content.data()), static_cast<uInt>(content.size()));
    if (damage) crc ^= 1;
    std::string common;
    append_little(common, 20, 2);                // version
    append_little(common, 0, 2);                 // flags
    append_little(common, deflated ? 8 : 0, 2);  // method
    append_little(common, 0, 4);                 // time
    append_little(common, crc, 4);
    append_little(common, packed.size(), 4);
    append_little(common, content.size(), 4);
    append_little(common, name.size(), 2);
    append_little(common, 0, 2);  // extra
    directory += "PK\x01\x02";
    append_little(directory, 20, 2);  // made by
    directory += common;
    append_little(directory, 0, 2 + 2 + 2 + 4);  // comment, disk, attributes
    append_little(directory, bytes.size(), 4);
    directory += name;
    bytes += "PK\x03\x04" + common + name + packed;
  }
  const std::size_t at = bytes.size();
  bytes += directory + "PK\x05\x06";
  append_little(bytes, 0, 4);
  append_little(bytes, entries.size(), 2);
  append_little(bytes, entries.size(), 2);
  append_little(bytes, directory.size(), 4);
  append_little(bytes, at, 4);
  append_little(bytes, 0, 2);
  return bytes;
}

std::string npy_of(const std::string& type, const std::string& shape, const std::string& bytes) {
  std::string header =
      "{'descr': '" + type + "', 'fortran_order': False, 'shape': " + shape + ", }";
  header.resize((header.size() + 10 + 64) / 64 * 64 - 10 - 1, ' ');
  header += '\n';
  std::string npy = "\x93NUMPY";
  npy += '\x01';
  npy += '\0';
  append_little(npy, header.size(), 2);
  return npy + header + bytes;
}

std::string npz_of(const std::vector<Image>& images, const std::vector<std::int64_t>& labels,
                   bool deflated) {
  std::string data, numbers;
  for (const Image& image : images) data += planes_of(image);
  for (const std::int64_t label : labels)
    append_little(numbers, static_cast<std::uint64_t>(label), 8);
  std::map<std::string, std::string> entries;
  entries["data.npy"] =
      npy_of("|u1", fmt::format("({}, {})", images.size(), images.at(0).pixels.size()), data);
  if (!labels.empty())
    entries["labels.npy"] = npy_of("<i8", fmt::format("({},)", labels.size()), numbers);
  return zip_of(entries, deflated);
}

}  // namespace birkhoff
