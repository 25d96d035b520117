#include "data/images/image_array.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <string_view>
#include <vector>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "data/text/text_file.h"

namespace birkhoff {
namespace {

// Of a file of idx or CIFAR images, which is held in memory. MNIST has 47 MB, CIFAR-100 154 MB.
constexpr std::int64_t kMaxBytes = 512 << 20;

constexpr std::string_view kIdxImages("\0\0\x08\x03", 4), kIdxLabels("\0\0\x08\x01", 4);
constexpr std::size_t kCifar10Bytes = 1 + 3072, kCifar100Bytes = 2 + 3072;

// The content of a file, unpacked if it is compressed.
std::string content_of(const std::string& path) {
  TextFile file(File::open_for_read(path), path);
  std::string bytes;
  std::vector<char> part(1 << 20);
  while (const std::size_t got = file.read_some(part.data(), part.size())) {
    bytes.append(part.data(), got);
    reject_if(std::ssize(bytes) > kMaxBytes, "has more than {} bytes, unpacked", kMaxBytes);
  }
  return bytes;
}

std::int64_t big_endian(const std::string& bytes, std::size_t at) {
  std::int64_t value = 0;
  for (std::size_t i = at; i < at + 4; ++i)
    value = value << 8 | static_cast<unsigned char>(bytes[i]);
  return value;
}

class IdxImages : public ImageArray {
 public:
  IdxImages(const std::string& path, std::string bytes) : bytes_(std::move(bytes)) {
    reject_if(bytes_.size() < kHeaderBytes, "damaged idx file: ends in its header");
    images_ = big_endian(bytes_, 4);
    shape_ = {{big_endian(bytes_, 8), big_endian(bytes_, 12)}, 1};
    const auto [rows, columns] = shape_.size;
    reject_if(images_ == 0, "idx file without images");
    reject_if(std::min(rows, columns) < 1 || std::max(rows, columns) > kMaxImageSide,
              "damaged idx file: images of {} x {} pixels", rows, columns);
    image_bytes_ = static_cast<std::size_t>(rows * columns);
    const std::size_t all = kHeaderBytes + static_cast<std::size_t>(images_) * image_bytes_;
    reject_if(bytes_.size() != all, "damaged idx file: {} bytes for {} images of {} x {} ({})",
              bytes_.size(), images_, rows, columns, all);
    const std::string labels = idx_labels_path(path);
    if (!labels.empty() && path_exists(labels)) read_labels(labels);
  }

  Image image(std::int64_t i) override {
    const auto begin =
        bytes_.begin() +
        static_cast<std::ptrdiff_t>(kHeaderBytes + static_cast<std::size_t>(i) * image_bytes_);
    return {shape_, {begin, begin + static_cast<std::ptrdiff_t>(image_bytes_)}};
  }

 private:
  void read_labels(const std::string& path) {
    const std::string labels = content_of(path);
    reject_if(!labels.starts_with(kIdxLabels) || labels.size() < 8,
              "its labels, {}, are no idx file of labels", path);
    reject_if(big_endian(labels, 4) != images_ || std::ssize(labels) != 8 + images_,
              "its labels, {}, hold {} in {} bytes for {} images", path, big_endian(labels, 4),
              labels.size(), images_);
    for (std::size_t i = 8; i < labels.size(); ++i)
      labels_.push_back(static_cast<unsigned char>(labels[i]));
  }

  static constexpr std::size_t kHeaderBytes = 16;
  std::string bytes_;
  std::size_t image_bytes_ = 0;
};

// Records of labels, then 1,024 values each of red, green and blue.
class CifarImages : public ImageArray {
 public:
  explicit CifarImages(std::string bytes) : bytes_(std::move(bytes)) {
    const bool fits10 = bytes_.size() % kCifar10Bytes == 0;
    reject_if(fits10 && bytes_.size() % kCifar100Bytes == 0,
              "may be CIFAR-10 or CIFAR-100: both divide its {} bytes; split the file",
              bytes_.size());
    record_bytes_ = fits10 ? kCifar10Bytes : kCifar100Bytes;
    images_ = std::ssize(bytes_) / static_cast<std::int64_t>(record_bytes_);
    shape_ = {{kSide, kSide}, 3};
    const int num_classes = fits10 ? 10 : 100;
    const std::size_t fine = record_bytes_ - 3072 - 1;  // CIFAR-100's first label is coarse
    for (std::size_t at = 0; at < bytes_.size(); at += record_bytes_) {
      const int label = static_cast<unsigned char>(bytes_[at + fine]);
      reject_if(label >= num_classes,
                "is neither PNG, JPEG, idx, npz nor CIFAR-{}: label {} of image {} is not below {}",
                num_classes, label, at / record_bytes_, num_classes);
      labels_.push_back(label);
    }
  }

  Image image(std::int64_t i) override {
    const char* planes = bytes_.data() + static_cast<std::size_t>(i + 1) * record_bytes_ - 3072;
    return from_planes(planes, kSide);
  }

 private:
  static constexpr std::int64_t kSide = 32;
  std::string bytes_;
  std::size_t record_bytes_ = 0;
};

std::string replaced(std::string name, const std::string& from, const std::string& to) {
  const std::size_t at = name.rfind(from);
  return at == std::string::npos ? "" : name.replace(at, from.size(), to);
}

// The path with both words of its last name replaced; empty if it lacks either.
std::string partner(const std::string& path, const std::array<std::string, 4>& words) {
  const std::filesystem::path whole(path);
  const std::string name =
      replaced(replaced(whole.filename().string(), words[0], words[1]), words[2], words[3]);
  return name.empty() ? "" : (whole.parent_path() / name).string();
}

}  // namespace

Image from_planes(const char* planes, std::int64_t side) {
  Image image{{{side, side}, 3}, {}};
  const auto size = static_cast<std::size_t>(side * side);
  image.pixels.resize(3 * size);
  for (std::size_t i = 0; i < size; ++i) {
    for (std::size_t c = 0; c < 3; ++c)
      image.pixels[3 * i + c] = static_cast<std::uint8_t>(planes[c * size + i]);
  }
  return image;
}

std::string idx_labels_path(const std::string& images_path) {
  return partner(images_path, {"images", "labels", "idx3", "idx1"});
}

std::string idx_images_path(const std::string& labels_path) {
  return partner(labels_path, {"labels", "images", "idx1", "idx3"});
}

std::unique_ptr<ImageArray> open_image_array(const std::string& path) {
  const File file = File::open_for_read(path);
  std::string start(static_cast<std::size_t>(std::min<std::int64_t>(file.size(), 4)), '\0');
  file.pread_exact(start.data(), start.size(), 0);
  if (start == "PK\x03\x04") return open_npz(path);
  reject_if(file.size() > kMaxBytes, "is too large for idx or CIFAR ({} bytes, at most {})",
            file.size(), kMaxBytes);
  std::string bytes = content_of(path);
  if (bytes.starts_with(kIdxImages)) return std::make_unique<IdxImages>(path, std::move(bytes));
  reject_if(bytes.starts_with(kIdxLabels),
            "holds idx labels; give their images, in a file of the same name with \"images\" and "
            "\"idx3\"");
  reject_if(bytes.empty(), "is empty");
  reject_if(bytes.size() % kCifar10Bytes != 0 && bytes.size() % kCifar100Bytes != 0,
            "is neither PNG, JPEG, idx, npz nor CIFAR (records of 3073 or 3074 bytes)");
  return std::make_unique<CifarImages>(std::move(bytes));
}

}  // namespace birkhoff
