// The images of the input of `birkhoff prepare --images`: where they are, their shape, their
// classes.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "data/images/image.h"
#include "data/images/image_decoder.h"
#include "data/prepare/records/record_input.h"

namespace birkhoff {

struct ImageOptions : RecordOptions {
  ImageForm form;  // what it does not set must be the same in all images
};

inline constexpr RecordNouns kImageNouns = {
    .row = "image",
    .a_row = "an image",
    .rows = "images",
    .doubt = "does each folder hold a class? --unlabeled makes no labels",
    .gives_class = "put it into a folder named after its class"};

class ImageInput final : public RecordInput {
 public:
  ImageInput(const ImageOptions& options, const Context& context);

  configs::CorpusManifest::Record record() const override;
  std::string describe() const override;
  std::unique_ptr<RowReader> reader() const override;

  // The shape of all images, in their form. Error(kData) if none can be read.
  const ImageShape& shape() const;
  // Error(kUsage) if it is not that shape. what: the image's name.
  void require_shape(const std::string& what, const ImageShape& shape) const;

 protected:
  const FileRows* rows_in(const Document& file) override;
  // The labels of an idx file of images.
  std::string companion(const Document& file, const FileRows& held) const override;

 private:
  void find_in(const Document& file);
  void note(const Document& file, const ImageFile& held);
  void note_shape(const Document& file, const ImageFile& held);

  const ImageOptions& options_;
  ImageDecoder decoder_;
  FileRows picture_{.rows = 1, .is_row = true};

  std::map<std::string, FileRows> files_;  // of many images, by path; and pictures by other names
  std::optional<ImageShape> shape_;
  std::string shape_of_ = "--image-size and --channels";  // what has the shape
};

}  // namespace birkhoff
