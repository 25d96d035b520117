// The images of the input of `birkhoff prepare --images`: where they are, their shape, their
// classes.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "cluster/base/collectives/process_group.h"
#include "data/corpus/shard_format.h"
#include "data/images/image.h"
#include "data/images/image_decoder.h"
#include "data/images/image_shards.h"
#include "data/prepare/classes.h"
#include "data/prepare/input/documents.h"
#include "data/prepare/out_folder.h"
#include "data/prepare/prepare_progress.h"

namespace birkhoff {

struct ImageOptions {
  ImageForm form;             // what it does not set must be the same in all images
  bool labels = true;         // take those of the input, if it has any
  bool skip_damaged = false;  // and count them; else the first one ends the command
  // Maximum size of a shard, unless it has a single image.
  std::int64_t shard_bytes = shard_format::kRecordShardBytes;
};

// An image of the input, valid during the visit.
struct InputImage {
  const Document& document;  // bytes: 1; label: the class that its folder names
  WantedImage wanted;
  std::int64_t bytes;  // its share of the file
};

class ImageInput {
 public:
  ImageInput(const ImageOptions& options, const std::vector<InputPath>& inputs,
             const OutFolder& folder, Classes& classes, ProgressReports& progress,
             ProcessGroup* ranks);

  // Finds the files that hold images, their shape and their classes. Call it first; collective over
  // `ranks`, of which rank 0 inspects the files of many images. Error(kData): a file cannot be
  // read, unless such files are skipped. Error(kUsage): files of many images differ in shape, or
  // only some images have classes.
  void find();
  // Visits the images in order. The scan counts images; its hash is that of files.
  InputScan for_each(const std::function<void(const InputImage&)>& visit);

  // Of the images that find() has found.
  const InputScan& scan() const { return scan_; }
  std::int64_t bytes() const { return bytes_; }
  bool has_classes() const { return !labeled_.empty(); }
  const ImageDamages& damages() const { return damages_; }  // of files that cannot be opened
  const std::vector<std::string>& notes() const { return notes_; }
  // The shape of all images, in their form. Error(kData) if none can be read.
  const ImageShape& shape() const;

  // Error(kUsage) if it is not that shape. what: the image's name.
  void require_shape(const std::string& what, const ImageShape& shape) const;
  // Counts what cannot be read, or throws it as Error(kData).
  void damaged(const std::string& reason, ImageDamages& damages) const;

 private:
  struct Inspected {
    ImageFile held;
    std::string damage;  // not empty: why the file cannot be read
  };

  const ImageFile* images_in(const Document& file);
  void find_in(const Document& file);
  const Inspected& inspect(const std::string& path);
  std::string inspected_files() const;
  void take_inspected(std::string_view files);
  void note(const Document& file, const ImageFile& held);
  void note_shape(const Document& file, const ImageFile& held);
  void visit_images(const Document& file, const ImageFile& held, DocumentCounts& counts,
                    const std::function<void(const InputImage&)>& visit) const;

  const ImageOptions& options_;
  const std::vector<InputPath>& inputs_;
  const OutFolder& folder_;
  Classes& classes_;
  ProgressReports& progress_;
  ProcessGroup* const ranks_;
  ImageDecoder decoder_;
  std::set<std::string> given_;
  ImageFile picture_;

  bool is_finding_ = false;
  std::map<std::string, Inspected> files_;  // of many images, by path; and pictures by other names
  std::optional<ImageShape> shape_;
  std::string shape_of_ = "--image-size and --channels";  // what has the shape
  std::string labeled_, unlabeled_;                       // the first file with and without a class
  std::int64_t bytes_ = 0, num_left_out_ = 0;
  std::string left_out_;  // the first one
  std::vector<std::string> notes_;
  ImageDamages damages_;
  InputScan scan_;
};

// "ROWS x COLUMNS".
std::string size_text(ImageSize size);

}  // namespace birkhoff
