// Makes image files in memory, for tests: PNG, JPEG, gzip, MNIST's idx, CIFAR's binary format, npz.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "data/images/image.h"

namespace birkhoff {

// The image with value (7 i^2 + 131 i + seed) mod 257 mod 256 at element i.
Image pattern(std::int64_t rows, std::int64_t columns, int channels, int seed = 0);

std::string png_of(const Image& image);
// Any PNG: values as they are in its rows, which are packed for fewer than 8 bits.
struct PngKind {
  int color_type, bit_depth;
  std::vector<std::uint8_t> palette = {};       // red, green, blue, ...
  std::vector<std::uint8_t> transparency = {};  // of the palette's colors
  bool interlaced = false;
};
std::string png_of(const PngKind& kind, std::int64_t rows, std::int64_t columns,
                   const std::vector<std::uint8_t>& values);

// channels: 1 (gray), 3 (color) or 4 (CMYK), of the image's values.
std::string jpeg_of(const Image& image, int quality = 100, bool progressive = false);

// Gray images of equal size, and their labels.
std::string idx_images_of(const std::vector<Image>& images);
std::string idx_labels_of(const std::vector<int>& labels);

// Color images of 32 x 32 pixels. labels: one or two (coarse, fine) for each.
std::string cifar_of(const std::vector<Image>& images, const std::vector<std::vector<int>>& labels);

// A zip of these entries, stored or deflated. damage: changes the stored checksum of all entries.
std::string zip_of(const std::map<std::string, std::string>& entries, bool deflated = false,
                   bool damage = false);
std::string npy_of(const std::string& type, const std::string& shape, const std::string& bytes);
// ImageNet-64's format: square color images, and labels as i64.
std::string npz_of(const std::vector<Image>& images, const std::vector<std::int64_t>& labels,
                   bool deflated = false);

}  // namespace birkhoff
