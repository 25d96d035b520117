// The making of a corpus of images: a record `image` (u8, rows x columns x channels) and, if the
// input has classes, a record `label`. See docs/corpus_format.md, "Images".
//
// An input is a PNG or JPEG file, or a file of many images (data/images/image_array.h), which is
// recognized by its content. In folders, files with other names than .png, .jpg, .jpeg, .npz, .bin
// and *idx*ubyte* are left out.
#pragma once

#include <functional>

#include "data/prepare/images/image_input.h"
#include "data/prepare/prepare.h"

namespace birkhoff {

class ProcessGroup;

// prepare_records() of images.
PrepareResult prepare_images(const PrepareOptions& options, const ImageOptions& images,
                             const std::function<void(const PrepareProgress&)>& progress = {},
                             ProcessGroup* ranks = nullptr);

}  // namespace birkhoff
