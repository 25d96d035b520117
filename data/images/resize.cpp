#include "data/images/resize.h"

#include <algorithm>
#include <cstdlib>

namespace birkhoff {
namespace {

// The weights of the inputs first, first + 1, ... of one output.
struct Taps {
  std::int64_t first = 0, sum = 0;
  std::vector<std::int64_t> weights;
};

Taps taps_of(std::int64_t output, std::int64_t m, std::int64_t n) {
  const std::int64_t radius = 2 * std::max(m, n), center = (2 * output + 1) * m;
  Taps taps;
  for (std::int64_t j = std::max<std::int64_t>(0, (center - radius) / (2 * n) - 1); j < m; ++j) {
    const std::int64_t weight = radius - std::abs((2 * j + 1) * n - center);
    if (weight <= 0) {
      if (taps.sum > 0) break;
      continue;
    }
    if (taps.sum == 0) taps.first = j;
    taps.weights.push_back(weight);
    taps.sum += weight;
  }
  return taps;
}

// Of the outputs [begin, begin + count) of a side of m pixels that becomes n.
std::vector<Taps> all_taps(std::int64_t m, std::int64_t n, std::int64_t begin, std::int64_t count) {
  std::vector<Taps> all;
  for (std::int64_t i = begin; i < begin + count; ++i) all.push_back(taps_of(i, m, n));
  return all;
}

// input: of the first tap; the next inputs follow `stride` bytes apart.
std::uint8_t mean(const Taps& taps, const std::uint8_t* input, std::int64_t stride) {
  std::int64_t sum = 0;
  for (const std::int64_t weight : taps.weights) {
    sum += weight * *input;
    input += stride;
  }
  return static_cast<std::uint8_t>((2 * sum + taps.sum) / (2 * taps.sum));
}

}  // namespace

ImageSize covering_size(ImageSize image, ImageSize size) {
  const auto [h, w] = image;
  if (size.rows * w >= size.columns * h) return {size.rows, w * size.rows / h};
  return {h * size.columns / w, size.columns};
}

Image resized(const Image& image, ImageSize size) {
  const auto [h, w] = image.shape.size;
  if (image.shape.size == size) return image;
  const std::int64_t channels = image.shape.channels;
  const ImageSize whole = covering_size(image.shape.size, size);
  const std::vector<Taps> across =
      all_taps(w, whole.columns, (whole.columns - size.columns) / 2, size.columns);
  const std::vector<Taps> down = all_taps(h, whole.rows, (whole.rows - size.rows) / 2, size.rows);
  // The rows of the image that the cropped one needs, resized.
  const std::int64_t first = down.front().first;
  const std::int64_t end = down.back().first + std::ssize(down.back().weights);
  std::vector<std::uint8_t> rows(static_cast<std::size_t>((end - first) * size.columns * channels));
  std::uint8_t* out = rows.data();
  for (std::int64_t row = first; row < end; ++row) {
    const std::uint8_t* in = image.pixels.data() + row * w * channels;
    for (const Taps& taps : across) {
      for (std::int64_t c = 0; c < channels; ++c)
        *out++ = mean(taps, in + taps.first * channels + c, channels);
    }
  }
  Image result{{size, image.shape.channels}, {}};
  const std::int64_t row_bytes = size.columns * channels;
  result.pixels.reserve(static_cast<std::size_t>(size.rows * row_bytes));
  for (const Taps& taps : down) {
    const std::uint8_t* in = rows.data() + (taps.first - first) * row_bytes;
    for (std::int64_t x = 0; x < row_bytes; ++x)
      result.pixels.push_back(mean(taps, in + x, row_bytes));
  }
  return result;
}

Image with_channels(Image image, int channels) {
  if (image.shape.channels == channels) return image;
  Image result{{image.shape.size, channels}, {}};
  const std::vector<std::uint8_t>& in = image.pixels;
  if (channels == 3) {
    result.pixels.reserve(3 * in.size());
    for (const std::uint8_t gray : in) result.pixels.insert(result.pixels.end(), 3, gray);
    return result;
  }
  result.pixels.reserve(in.size() / 3);
  for (std::size_t i = 0; i < in.size(); i += 3) {
    result.pixels.push_back(static_cast<std::uint8_t>(
        (19595u * in[i] + 38470u * in[i + 1] + 7471u * in[i + 2] + 32768u) >> 16));
  }
  return result;
}

Image in_form(Image image, const ImageForm& form) {
  if (form.channels) image = with_channels(std::move(image), *form.channels);
  return form.size ? resized(image, *form.size) : image;
}

}  // namespace birkhoff
