#include "data/prepare/images/image_input.h"

#include <algorithm>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "cluster/base/text/plural.h"
#include "configs/loader/message_text.h"
#include "data/corpus/manifest.h"
#include "data/images/image_array.h"

namespace birkhoff {
namespace {

bool is_picture_name(const std::string& path) {
  return has_suffix(path, {".png", ".jpg", ".jpeg"});
}

bool is_array_name(const std::string& path) {
  const std::string name = lower_case(path.substr(path.rfind('/') + 1));
  return has_suffix(name, {".npz", ".bin"}) ||
         (name.find("idx") != std::string::npos && name.find("ubyte") != std::string::npos);
}

// "ROWS x COLUMNS".
std::string size_text(ImageSize size) { return fmt::format("{} x {}", size.rows, size.columns); }

class ImageReader final : public RowReader {
 public:
  ImageReader(const ImageInput& input, const ImageForm& form) : input_(input), decoder_(form) {}

  void read(const std::vector<WantedRow>& wanted,
            const std::function<void(std::size_t, const ReadRow&)>& take) override {
    std::vector<WantedImage> images;
    for (const WantedRow& row : wanted)
      images.push_back({row.path, std::max<std::int64_t>(row.number, 0), row.number < 0});
    decoder_.decode(images, [&](std::size_t i, const DecodedImage& decoded) {
      ReadRow row{.damage = decoded.damage, .values = {}, .label = {}};
      if (decoded.damage.empty()) {
        input_.require_shape(wanted[i].path, decoded.image.shape);
        row.values.assign(decoded.image.pixels.begin(), decoded.image.pixels.end());
        if (decoded.label >= 0) row.label = std::to_string(decoded.label);
      }
      take(i, row);
    });
  }

 private:
  const ImageInput& input_;
  ImageDecoder decoder_;
};

}  // namespace

ImageInput::ImageInput(const ImageOptions& options, const Context& context)
    : RecordInput(options, kImageNouns, context), options_(options), decoder_(options.form) {
  if (options.form.size && options.form.channels)
    shape_ = ImageShape{*options.form.size, *options.form.channels};
}

const ImageShape& ImageInput::shape() const {
  if (!shape_) {
    fail(ExitCode::kData, "{}: none of {} can be read; without --skip-damaged, the first says why",
         context().inputs.front().path, counted(scan().documents, "image"));
  }
  return *shape_;
}

void ImageInput::require_shape(const std::string& what, const ImageShape& shape) const {
  if (shape.size != shape_->size) {
    fail(ExitCode::kUsage,
         "{}: has {} pixels, but {} has {}; give --image-size to make all images equal", what,
         size_text(shape.size), shape_of_, size_text(shape_->size));
  }
  if (shape.channels != shape_->channels) {
    fail(ExitCode::kUsage,
         "{}: has {}, but {} has {}; give --channels 1 or --channels 3 to convert", what,
         counted(shape.channels, "channel"), shape_of_, shape_->channels);
  }
}

configs::CorpusManifest::Record ImageInput::record() const {
  const auto& [size, channels] = shape();
  configs::CorpusManifest::Record record = image_record(size.rows, size.columns, channels);
  if (options_.form.size) {
    record.set_resized(
        fmt::format("to cover {} by the triangle filter, cropped at the center", size_text(size)));
  }
  return record;
}

std::string ImageInput::describe() const {
  return fmt::format("images {} x {}{}", size_text(shape().size), shape().channels,
                     options_.form.size ? ", resized" : "");
}

std::unique_ptr<RowReader> ImageInput::reader() const {
  return std::make_unique<ImageReader>(*this, options_.form);
}

std::string ImageInput::companion(const Document& file, const FileRows& held) const {
  return held.is_row ? "" : idx_labels_path(file.path);
}

const RecordInput::FileRows* ImageInput::rows_in(const Document& file) {
  if (is_picture_name(file.name)) {
    if (is_finding()) note(file, {.is_picture = true, .images = 1, .shape = {}, .labels = {}});
    return &picture_;
  }
  if (is_finding()) find_in(file);
  const auto found = files_.find(file.path);
  return found == files_.end() ? nullptr : &found->second;
}

// For a file that by its name is no picture.
void ImageInput::find_in(const Document& file) {
  if (!is_array_name(file.name) && !is_given(file)) return leave_out(file);
  const std::string images = idx_images_path(file.path);
  if (!images.empty() && path_exists(images)) return;  // labels, read with their images
  reads_file([&] {
    const ImageFile held = decoder_.inspect(file.path);
    note(file, held);
    files_[file.path] = {held.images, held.is_picture};
  });
}

// Takes the shape and the classes of a file into account.
void ImageInput::note(const Document& file, const ImageFile& held) {
  note_shape(file, held);
  const std::string folder = folder_of(file);
  const bool has_class = held.is_picture ? !folder.empty() : !held.labels.empty();
  note_file(file, has_class);
  if (!options_.labels || !has_class) return;
  for (const std::int64_t label : held.labels) add_class(file, std::to_string(label));
  if (!held.is_picture) return;
  if (!is_class_name(folder)) {
    fail(ExitCode::kUsage,
         "{}: the name of its folder, which names its class, is not UTF-8 or holds control "
         "characters; rename it, or give --unlabeled",
         printable(file.shown_path));
  }
  add_class(file, folder);
}

void ImageInput::note_shape(const Document& file, const ImageFile& held) {
  std::optional<ImageShape> shape;
  if (!held.is_picture) {
    shape = options_.form.of(held.shape);
  } else if (!shape_) {
    decoder_.decode({{file.path, 0, true}}, [&](std::size_t, const DecodedImage& decoded) {
      if (decoded.damage.empty()) {
        shape = decoded.image.shape;
      } else if (!options_.skip_damaged) {
        damaged(decoded.damage, file_damages());
      }  // else it is counted when it is read
    });
  }
  if (!shape) return;
  if (!shape_) {
    shape_ = shape;
    shape_of_ = file.shown_path;
  }
  require_shape(file.shown_path, *shape);
}

}  // namespace birkhoff
