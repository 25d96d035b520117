// The resizing of images, with antialiasing. It uses integers only, so its result is the same on
// every machine.
//
// A side of m pixels becomes n pixels with the triangle filter, whose radius is one pixel of the
// coarser side. With M = max(m, n), output i is the weighted mean of the inputs j:
//
//   w_ij = max(0, 2M - |(2j + 1) n - (2i + 1) m|)
//   y_i  = floor((2 sum_j w_ij x_j + sum_j w_ij) / (2 sum_j w_ij))      rounded, half up
//
// Rows are resized first, and rounded to 8 bits, then columns. Pillow's BILINEAR differs by at most
// one level: it rounds the weights.
#pragma once

#include "data/images/image.h"

namespace birkhoff {

// The smallest size with the proportions of `image`, rounded down, that covers `size`: one side is
// equal.
ImageSize covering_size(ImageSize image, ImageSize size);

// The image, resized to the covering size and cropped to `size` at its center (the smaller half of
// the excess is cut off at the top and at the left).
Image resized(const Image& image, ImageSize size);

// 1 from 3 channels: gray = (19595 red + 38470 green + 7471 blue + 32768) / 65536, rounded down
// (ITU-R BT.601). 3 from 1: the gray value three times.
Image with_channels(Image image, int channels);

// with_channels(), then resized().
Image in_form(Image image, const ImageForm& form);

}  // namespace birkhoff
