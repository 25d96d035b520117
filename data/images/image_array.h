// Files of many images: MNIST's idx, CIFAR's binary format, ImageNet-64's npz batches. Damaged
// files may crash the libraries that unpack them, so the product opens files in a child process
// (data/images/image_decoder.h).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "data/images/image.h"

namespace birkhoff {

class ImageArray {
 public:
  virtual ~ImageArray() = default;

  std::int64_t images() const { return images_; }
  const ImageShape& shape() const { return shape_; }
  // One for each image; empty: the file has none.
  const std::vector<std::int64_t>& labels() const { return labels_; }
  // Image i. Fast if i grows from call to call. std::invalid_argument: the file is damaged.
  virtual Image image(std::int64_t i) = 0;
  // Reads what opening has not read. std::invalid_argument: the file is damaged.
  virtual void check() {}

 protected:
  std::int64_t images_ = 0;
  ImageShape shape_;
  std::vector<std::int64_t> labels_;
};

// Recognizes the format by the content, which gzip may have compressed (idx only).
// std::invalid_argument says why the file cannot be read.
std::unique_ptr<ImageArray> open_image_array(const std::string& path);

// The file that holds the labels of an idx file of images, by its name: "images" becomes "labels",
// "idx3" "idx1". And back. Empty if the name lacks either.
std::string idx_labels_path(const std::string& images_path);
std::string idx_images_path(const std::string& labels_path);

// For open_image_array. An npz: `data` is u8, a row for each image, of all its red, then green,
// then blue values; `labels`, if there are any, are integers.
std::unique_ptr<ImageArray> open_npz(const std::string& path);
// The image with these values, plane after plane of side x side.
Image from_planes(const char* planes, std::int64_t side);

}  // namespace birkhoff
