#include <minizip/unzip.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string_view>

#include "cluster/base/error.h"
#include "cluster/base/text/number_text.h"
#include "cluster/base/unique_handle.h"
#include "data/images/image_array.h"

namespace birkhoff {
namespace {

struct UnzipTraits {
  using Handle = unzFile;
  static Handle null() { return nullptr; }
  static void close(Handle handle) noexcept { unzClose(handle); }
};

// One array of an npz file, a zip of npy files: read from its begin to its end.
class NpyReader {
 public:
  NpyReader(const std::string& path, std::string name)
      : name_(std::move(name)), zip_(unzOpen64(path.c_str())) {
    reject_if(!zip_, "damaged npz: it has no zip directory");
    found_ = unzLocateFile(zip_.get(), (name_ + ".npy").c_str(), 1) == UNZ_OK;
    if (found_) begin();
  }

  // Whether the zip has the array. If not, nothing else may be called.
  bool found() const { return found_; }
  const std::string& type() const { return type_; }  // NumPy's: "|u1", "<i8"
  const std::vector<std::int64_t>& shape() const { return shape_; }

  // Starts over.
  void begin() {
    unz_file_info64 info;
    reject_if(
        unzGetCurrentFileInfo64(zip_.get(), &info, nullptr, 0, nullptr, 0, nullptr, 0) != UNZ_OK ||
            (info.flag & 1) != 0 || unzOpenCurrentFile(zip_.get()) != UNZ_OK,
        "damaged npz: cannot open its array '{}' (method {}, flags {})", name_,
        info.compression_method, info.flag);
    char head[12];
    read(head, 10);
    const bool is_npy = std::memcmp(head, "\x93NUMPY", 6) == 0;
    std::size_t length = byte(head[8]) | byte(head[9]) << 8;
    if (is_npy && head[6] > 1) {
      read(head + 10, 2);
      length |= byte(head[10]) << 16 | byte(head[11]) << 24;
    }
    reject_if(!is_npy || length > kMaxHeaderBytes, "damaged npz: its array '{}' is no npy file",
              name_);
    std::string header(length, '\0');
    read(header.data(), length);
    parse(header);
  }

  void read(void* out, std::size_t bytes) {
    auto* next = static_cast<char*>(out);
    while (bytes > 0) {
      const auto part = static_cast<unsigned>(std::min<std::size_t>(bytes, 1 << 30));
      const int got = unzReadCurrentFile(zip_.get(), next, part);
      reject_if(got <= 0, "damaged npz: its array '{}' ends early or does not unpack", name_);
      next += got;
      bytes -= static_cast<std::size_t>(got);
    }
  }

  // Call after the last value was read: the array must end here and have its checksum.
  void finish() {
    char more;
    reject_if(
        unzReadCurrentFile(zip_.get(), &more, 1) != 0 || unzCloseCurrentFile(zip_.get()) != UNZ_OK,
        "damaged npz: its array '{}' does not have its size and checksum", name_);
  }

 private:
  static constexpr std::size_t kMaxHeaderBytes = 1 << 16;

  static std::size_t byte(char c) { return static_cast<unsigned char>(c); }

  // What follows the key in a dictionary's text.
  std::string_view value_of(std::string_view header, std::string_view key) const {
    const std::size_t at = header.find(key);
    reject_if(at == std::string_view::npos, "damaged npz: the header of its array '{}' lacks {}",
              name_, key);
    header.remove_prefix(at + key.size());
    header.remove_prefix(std::min(header.find_first_not_of(" :"), header.size()));
    return header;
  }

  void parse(std::string_view header) {
    const std::string_view type = value_of(header, "'descr'");
    type_ = type.starts_with('\'') ? type.substr(1, type.find('\'', 1) - 1) : "";
    reject_if(type_.empty() || type_.size() > 8 || type_.find_first_of("\n\r\t\x1b") != type_.npos,
              "its array '{}' has no plain type", name_);
    reject_if(!value_of(header, "'fortran_order'").starts_with("False"),
              "its array '{}' is in Fortran's order; save it in C's", name_);
    std::string_view shape = value_of(header, "'shape'");
    shape = shape.substr(0, shape.find(')'));
    shape_.clear();
    while (true) {
      shape.remove_prefix(std::min(shape.find_first_of("0123456789"), shape.size()));
      if (shape.empty()) return;
      const std::string_view digits = shape.substr(0, shape.find_first_not_of("0123456789"));
      const auto size = parse_number<std::int64_t>(digits);
      reject_if(!size || *size < 1 || *size > kMaxSize || shape_.size() == 8,
                "its array '{}' has a side of {} elements, or more than 8 sides", name_,
                digits.substr(0, 20));
      shape_.push_back(*size);
      shape.remove_prefix(digits.size());
    }
  }

  static constexpr std::int64_t kMaxSize = 1 << 30;

  std::string name_;
  UniqueHandle<UnzipTraits> zip_;
  bool found_ = false;
  std::string type_;
  std::vector<std::int64_t> shape_;
};

class NpzImages : public ImageArray {
 public:
  explicit NpzImages(const std::string& path) : data_(path, "data") {
    reject_if(!data_.found(), "is a zip without data.npy; npz batches hold 'data' and 'labels'");
    const std::vector<std::int64_t>& shape = data_.shape();
    const auto side =
        shape.size() != 2 ? 0 : std::llround(std::sqrt(static_cast<double>(shape[1]) / 3));
    reject_if(data_.type() != "|u1" || shape.size() != 2 || 3 * side * side != shape[1] ||
                  side * side > kMaxImagePixels,
              "its array 'data' is {} of {} dimensions; it must be |u1 of images x 3 side^2",
              data_.type(), shape.size());
    images_ = shape[0];
    shape_ = {{side, side}, 3};
    planes_.resize(static_cast<std::size_t>(shape[1]));
    read_labels(path);
  }

  Image image(std::int64_t i) override {
    if (i < next_) rewind();
    for (; next_ <= i; ++next_) data_.read(planes_.data(), planes_.size());
    return from_planes(planes_.data(), shape_.size.rows);
  }

  void check() override {
    image(images_ - 1);
    data_.finish();
    rewind();
  }

 private:
  void rewind() {
    data_.begin();
    next_ = 0;
  }

  void read_labels(const std::string& path) {
    NpyReader labels(path, "labels");
    if (!labels.found()) return;
    const std::string& type = labels.type();
    const bool is_integer = type.size() == 3 && (type[0] == '<' || type[0] == '|') &&
                            (type[1] == 'i' || type[1] == 'u') &&
                            std::string_view("1248").find(type[2]) != std::string_view::npos;
    reject_if(!is_integer, "its array 'labels' is {}, not of little-endian integers", type);
    reject_if(labels.shape() != std::vector{images_},
              "its array 'labels' does not have one element for each of {} images", images_);
    const auto width = static_cast<std::size_t>(type[2] - '0');
    for (std::int64_t i = 0; i < images_; ++i) {
      std::int64_t label = 0;
      labels.read(&label, width);
      const bool is_negative =
          label < 0 || (type[1] == 'i' && width < 8 && label >> (8 * width - 1) != 0);
      reject_if(is_negative, "the label of image {} is negative", i);
      labels_.push_back(label);
    }
    labels.finish();
  }

  NpyReader data_;
  std::int64_t next_ = 0;  // the image that data_ is at
  std::string planes_;     // of image next_ - 1
};

}  // namespace

std::unique_ptr<ImageArray> open_npz(const std::string& path) {
  return std::make_unique<NpzImages>(path);
}

}  // namespace birkhoff
