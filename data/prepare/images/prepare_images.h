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

// As prepare_corpus(); of `options`, it takes the output folder, the paths, the fractions and the
// class names. The same command keeps the shards that an earlier one has finished. Error(kData)
// names the first file that cannot be read, unless images.skip_damaged; Error(kUsage) an image of
// another size or other channels than the first one, or without a class if others have one.
//
// ranks: if not null, they divide the shards among them; collective over them. The bytes are those
// of one rank. The result is rank 0's, and `progress` is called with what a rank itself reads.
PrepareResult prepare_images(const PrepareOptions& options, const ImageOptions& images,
                             const std::function<void(const PrepareProgress&)>& progress = {},
                             ProcessGroup* ranks = nullptr);

}  // namespace birkhoff
