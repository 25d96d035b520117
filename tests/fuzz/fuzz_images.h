// Shared by the fuzz targets of image files.
#pragma once

#include <stdexcept>

#include "configs/loader/message_text.h"
#include "data/images/image_array.h"
#include "tests/fuzz/fuzz_input.h"

namespace birkhoff {

inline void expect_whole(const Image& image) {
  const auto& [size, channels] = image.shape;
  expect_promise(size.rows > 0 && size.columns > 0 && (channels == 1 || channels == 3),
                 "an image has pixels, gray or color");
  expect_promise(std::ssize(image.pixels) == size.rows * size.columns * channels,
                 "an image has all its pixels");
}

// Runs `body`, which may refuse its input by std::invalid_argument with one short line.
template <typename Body>
void read_or_refuse(Body body) {
  try {
    body();
  } catch (const std::invalid_argument& refusal) {
    expect_line(printable(refusal.what()));
  }
}

// Reads the file as `birkhoff prepare` does.
inline void read_image_array(const std::string& path) {
  read_or_refuse([&] {
    const auto array = open_image_array(path);
    expect_promise(array->labels().empty() || std::ssize(array->labels()) == array->images(),
                   "every image has a label, or none");
    for (const std::int64_t label : array->labels())
      expect_promise(label >= 0, "labels are not negative");
    array->check();
    for (const std::int64_t i : {std::int64_t{0}, array->images() - 1, array->images() / 2}) {
      const Image image = array->image(i);
      expect_promise(image.shape == array->shape(), "all images have the shape of the file");
      expect_whole(image);
    }
  });
}

}  // namespace birkhoff
