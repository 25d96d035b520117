// Reads images in a limited child process, because the libraries that parse image files may crash
// on damaged ones, and brings them into a form there.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cluster/base/files/sandboxed_child.h"
#include "data/images/image.h"

namespace birkhoff {

// What a file holds.
struct ImageFile {
  bool is_picture = false;  // PNG or JPEG
  std::int64_t images = 0;
  ImageShape shape;                  // unset for a picture
  std::vector<std::int64_t> labels;  // the different ones, ascending; empty: the file has none
};

struct WantedImage {
  std::string path;
  std::int64_t image = 0;   // in a file of many
  bool is_picture = false;  // PNG or JPEG
};

struct DecodedImage {
  std::string damage;  // not empty: why there is no image, beginning with the path
  Image image;
  std::int64_t label = -1;  // in its file; -1: it has none
};

class ImageDecoder {
 public:
  explicit ImageDecoder(const ImageForm& form);

  // Checks the whole file if it holds many images. Error(kData) that begins with the path: it
  // cannot be read.
  ImageFile inspect(const std::string& path);
  // Calls take(i, image) for each, in order. The child holds the last file open: ask for images of
  // a file in the order of their numbers. Errors of the file system are thrown.
  void decode(const std::vector<WantedImage>& wanted,
              const std::function<void(std::size_t i, DecodedImage decoded)>& take);

  // What a file may take.
  static constexpr ChildLimits kLimits = {
      .cpu_seconds = 120, .wall_seconds = 600, .more_bytes = std::int64_t{2} << 30};

 private:
  LimitedChild child_;
};

}  // namespace birkhoff
