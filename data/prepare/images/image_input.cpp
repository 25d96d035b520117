#include "data/prepare/images/image_input.h"

#include <string_view>

#include "cluster/base/error.h"
#include "cluster/base/files/checksum.h"
#include "cluster/base/files/file.h"
#include "cluster/base/text/plural.h"
#include "configs/loader/message_text.h"
#include "data/corpus/manifest.h"
#include "data/images/image_array.h"
#include "data/prepare/pack.h"

namespace birkhoff {
namespace {

std::string lower_case(std::string text) {
  for (char& c : text) c = static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
  return text;
}

bool is_picture_name(const std::string& path) {
  const std::string name = lower_case(path);
  return name.ends_with(".png") || name.ends_with(".jpg") || name.ends_with(".jpeg");
}

bool is_array_name(const std::string& path) {
  const std::string name = lower_case(path.substr(path.rfind('/') + 1));
  return name.ends_with(".npz") || name.ends_with(".bin") ||
         (name.find("idx") != std::string::npos && name.find("ubyte") != std::string::npos);
}

// The folder of a file, relative to the given one; empty if that is it.
std::string folder_of(const Document& file) {
  const std::size_t slash = file.name.rfind('/');
  return slash == std::string::npos ? "" : file.name.substr(0, slash);
}

// The labels of an idx file need not be part of the input.
void add_labels(const Document& file, const ImageFile& held, Xxh3Hasher& hasher) {
  const std::string labels = idx_labels_path(file.path);
  struct stat info;
  if (held.is_picture || labels.empty() || !find_status(labels, /*follow_links=*/true, &info))
    return;
  const std::string entry =
      fmt::format("{} {} {}\n", file.name, info.st_size, modification_time(info));
  hasher.update(entry.data(), entry.size());
}

}  // namespace

std::string size_text(ImageSize size) { return fmt::format("{} x {}", size.rows, size.columns); }

ImageInput::ImageInput(const ImageOptions& options, const std::vector<InputPath>& inputs,
                       const OutFolder& folder, Classes& classes, ProgressReports& progress,
                       ProcessGroup* ranks)
    : options_(options),
      inputs_(inputs),
      folder_(folder),
      classes_(classes),
      progress_(progress),
      ranks_(ranks),
      decoder_(options.form) {
  picture_.is_picture = true;
  picture_.images = 1;
  for (const InputPath& input : inputs) given_.insert(input.path);
  if (options.form.size && options.form.channels)
    shape_ = ImageShape{*options.form.size, *options.form.channels};
}

void ImageInput::find() {
  progress_.begin("find images", 0);
  constexpr char kFiles[] = "files of images";
  const bool is_first = ranks_ == nullptr || ranks_->rank() == 0;
  if (!is_first) take_inspected(ranks_->broadcast_bytes("", 0, kFiles));
  is_finding_ = true;
  scan_ = for_each([](const InputImage&) {});
  is_finding_ = false;
  if (is_first && ranks_ != nullptr) ranks_->broadcast_bytes(inspected_files(), 0, kFiles);
  progress_.end(false);
  if (num_left_out_ == 1)
    notes_.push_back(fmt::format("left out {}, whose name is not that of an image", left_out_));
  if (num_left_out_ > 1) {
    notes_.push_back(fmt::format("left out {} and {}, whose names are not those of images",
                                 left_out_, counted(num_left_out_ - 1, "more file")));
  }
  if (!labeled_.empty() && !unlabeled_.empty()) {
    fail(ExitCode::kUsage,
         "{}: has no class, but {} has; put it into a folder named after its class, or give "
         "--unlabeled",
         unlabeled_, labeled_);
  }
  if (has_classes()) classes_.finish(inputs_.front().path);
}

InputScan ImageInput::for_each(const std::function<void(const InputImage&)>& visit) {
  DocumentCounts counts;
  Xxh3Hasher hasher;
  const InputScan files = for_each_document(
      inputs_, folder_.path(),
      [&](const Document& file) {
        const ImageFile* held = images_in(file);
        if (is_finding_) progress_.add(file.bytes);
        if (held == nullptr) return;
        add_labels(file, *held, hasher);
        visit_images(file, *held, counts, visit);
      },
      EmptyFiles::kVisit);
  InputScan images = counts.scan(files);
  hasher.update(files.hash.data(), files.hash.size());
  images.hash = hasher.hex_digest();
  return images;
}

const ImageShape& ImageInput::shape() const {
  if (!shape_) {
    fail(ExitCode::kData, "{}: none of {} can be read; without --skip-damaged, the first says why",
         inputs_.front().path, counted(scan_.documents, "image"));
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

void ImageInput::damaged(const std::string& reason, ImageDamages& damages) const {
  if (!options_.skip_damaged)
    fail(ExitCode::kData, "{}; repair or remove it, or give --skip-damaged", reason);
  damages.add(printable(reason));
}

// What the file holds; null: no images, or none that can be read.
const ImageFile* ImageInput::images_in(const Document& file) {
  if (is_picture_name(file.name)) {
    if (is_finding_) note(file, picture_);
    return &picture_;
  }
  if (is_finding_) find_in(file);
  const auto found = files_.find(file.path);
  return found == files_.end() || !found->second.damage.empty() ? nullptr : &found->second.held;
}

// For a file that by its name is no picture.
void ImageInput::find_in(const Document& file) {
  if (!is_array_name(file.name) && !given_.contains(file.path)) {
    if (num_left_out_++ == 0) left_out_ = printable(file.path);
    return;
  }
  const std::string images = idx_images_path(file.path);
  if (!images.empty() && path_exists(images)) return;  // labels, read with their images
  const Inspected& found = inspect(file.path);
  if (!found.damage.empty()) return damaged(found.damage, damages_);
  note(file, found.held);
}

const ImageInput::Inspected& ImageInput::inspect(const std::string& path) {
  const auto [entry, is_new] = files_.try_emplace(path);
  Inspected& file = entry->second;
  if (!is_new) return file;  // rank 0 has done it
  try {
    file.held = decoder_.inspect(path);
  } catch (const Error& error) {
    if (error.code() != ExitCode::kData) throw;
    file.damage = error.what();
  }
  return file;
}

std::string ImageInput::inspected_files() const {
  std::string bytes;
  for (const auto& [path, file] : files_) {
    const ImageFile& held = file.held;
    pack(path, bytes);
    pack(file.damage, bytes);
    pack(std::vector<std::int64_t>{held.is_picture ? 1 : 0, held.images, held.shape.size.rows,
                                   held.shape.size.columns, held.shape.channels},
         bytes);
    pack(held.labels, bytes);
  }
  return bytes;
}

// files: what inspected_files() has returned on rank 0.
void ImageInput::take_inspected(std::string_view files) {
  while (!files.empty()) {
    Inspected& file = files_[unpack<std::string>(files)];
    file.damage = unpack<std::string>(files);
    const auto numbers = unpack<std::vector<std::int64_t>>(files);
    file.held = {numbers[0] != 0,
                 numbers[1],
                 {{numbers[2], numbers[3]}, static_cast<int>(numbers[4])},
                 unpack<std::vector<std::int64_t>>(files)};
  }
}

// Takes the shape and the classes of a file into account.
void ImageInput::note(const Document& file, const ImageFile& held) {
  bytes_ += file.bytes;
  note_shape(file, held);
  if (!options_.labels) return;
  const std::string folder = folder_of(file);
  const bool has_class = held.is_picture ? !folder.empty() : !held.labels.empty();
  std::string& first = has_class ? labeled_ : unlabeled_;
  if (first.empty()) first = file.shown_path;
  if (!has_class) return;
  const auto add = [&](std::string_view label) {
    Document labeled = file;
    labeled.label = label;
    classes_.add(labeled);
  };
  for (const std::int64_t label : held.labels) add(std::to_string(label));
  if (!held.is_picture) return;
  if (!is_class_name(folder)) {
    fail(ExitCode::kUsage,
         "{}: the name of its folder, which names its class, is not UTF-8 or holds control "
         "characters; rename it, or give --unlabeled",
         printable(file.shown_path));
  }
  add(folder);
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
        damaged(decoded.damage, damages_);
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

void ImageInput::visit_images(const Document& file, const ImageFile& held, DocumentCounts& counts,
                              const std::function<void(const InputImage&)>& visit) const {
  Document document = file;
  document.bytes = 1;
  document.is_whole = true;
  const std::string folder = folder_of(file);
  if (held.is_picture) {
    if (has_classes()) document.label = folder;
    counts.add(document);
    return visit({document, {file.path, 0, true}, file.bytes});
  }
  for (std::int64_t i = 0; i < held.images; ++i) {
    document.name = fmt::format("{}:{}", file.name, i);
    document.shown_path = fmt::format("{}:{}", file.shown_path, i);
    counts.add(document);
    const auto up_to = [&](std::int64_t end) { return file.bytes * end / held.images; };
    visit({document, {file.path, i, false}, up_to(i + 1) - up_to(i)});
  }
}

}  // namespace birkhoff
