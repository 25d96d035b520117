#include "data/images/image_decoder.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string_view>

#include "cluster/base/text/number_text.h"
#include "configs/loader/message_text.h"
#include "data/images/image_array.h"
#include "data/images/picture.h"
#include "data/images/resize.h"

namespace birkhoff {
namespace {

// Of a file with a picture. The largest that libraries need to see whole.
constexpr std::int64_t kMaxPictureBytes = 256 << 20;

// A request is a letter, a number and a path: "a17 path" for image 17 of an array, "p0 path" for a
// picture, "i0 path" to inspect a file.
enum : char { kArray = 'a', kPicture = 'p', kInspect = 'i' };

std::string read_picture_file(const std::string& path) {
  const File file = File::open_for_read(path);
  reject_if(file.size() > kMaxPictureBytes, "has {} bytes (at most {})", file.size(),
            kMaxPictureBytes);
  std::string bytes(static_cast<std::size_t>(file.size()), '\0');
  file.pread_exact(bytes.data(), bytes.size(), 0);
  return bytes;
}

// An answer begins with one of these; both processes are the same program.
struct ImageHead {
  ImageShape shape;
  std::int64_t label;
};
struct FileHead {
  std::int64_t is_picture;  // 0 or 1
  std::int64_t images;
  ImageShape shape;
};

bool is_possible(const ImageShape& shape) {
  const auto is_side = [](std::int64_t side) { return side >= 1 && side <= kMaxImageSide; };
  return is_side(shape.size.rows) && is_side(shape.size.columns) &&
         (shape.channels == 1 || shape.channels == 3);
}

std::int64_t num_values(const ImageShape& shape) {
  return shape.size.rows * shape.size.columns * shape.channels;
}

template <typename Head, typename Element>
std::string answer_of(const Head& head, const std::vector<Element>& rest) {
  const std::size_t bytes = rest.size() * sizeof(Element);
  std::string answer(sizeof head + bytes, '\0');
  std::memcpy(answer.data(), &head, sizeof head);
  if (bytes > 0) std::memcpy(answer.data() + sizeof head, rest.data(), bytes);
  return answer;
}

// Nothing if the answer is too short.
template <typename Head, typename Element>
std::optional<Head> head_of(const std::string& answer, std::vector<Element>& rest) {
  Head head;
  if (answer.size() < sizeof head) return std::nullopt;
  std::memcpy(&head, answer.data(), sizeof head);
  rest.resize((answer.size() - sizeof head) / sizeof(Element));
  if (!rest.empty())
    std::memcpy(rest.data(), answer.data() + sizeof head, rest.size() * sizeof(Element));
  return head;
}

// Lives in the child.
class ImageServer {
 public:
  explicit ImageServer(const ImageForm& form) : form_(form) {}

  std::string answer(const std::string& request) {
    const std::size_t space = request.find(' ');
    const std::string path = request.substr(space + 1);
    const auto number =
        parse_number<std::int64_t>(std::string_view(request).substr(1, space - 1)).value();
    try {
      if (request[0] == kInspect) return inspect(path);
      if (request[0] == kPicture) return image_answer(read_picture(read_picture_file(path)), -1);
      ImageArray& array = opened(path);
      reject_if(number >= array.images(), "has only {} images: it changed", array.images());
      const auto& labels = array.labels();
      return image_answer(array.image(number),
                          labels.empty() ? -1 : labels[static_cast<std::size_t>(number)]);
    } catch (const std::invalid_argument& error) {
      array_.reset();
      fail(ExitCode::kData, "{}: {}", path, printable(error.what()));
    }
  }

 private:
  std::string inspect(const std::string& path) {
    const File file = File::open_for_read(path);
    std::string start(static_cast<std::size_t>(std::min<std::int64_t>(file.size(), 8)), '\0');
    file.pread_exact(start.data(), start.size(), 0);
    std::vector<std::int64_t> labels;
    if (is_png(start) || is_jpeg(start)) return answer_of(FileHead{1, 1, {}}, labels);
    ImageArray& array = opened(path);
    array.check();
    labels = array.labels();
    std::sort(labels.begin(), labels.end());
    labels.erase(std::unique(labels.begin(), labels.end()), labels.end());
    return answer_of(FileHead{0, array.images(), array.shape()}, labels);
  }

  ImageArray& opened(const std::string& path) {
    if (!array_ || path_ != path) {
      array_.reset();  // first: two may not fit into memory
      array_ = open_image_array(path);
      path_ = path;
    }
    return *array_;
  }

  std::string image_answer(Image image, std::int64_t label) const {
    image = in_form(std::move(image), form_);
    return answer_of(ImageHead{image.shape, label}, image.pixels);
  }

  const ImageForm form_;
  std::string path_;  // of array_
  std::unique_ptr<ImageArray> array_;
};

}  // namespace

ImageDecoder::ImageDecoder(const ImageForm& form)
    : child_([server = std::make_shared<ImageServer>(form)](
                 const std::string& request) { return server->answer(request); },
             kLimits) {}

ImageFile ImageDecoder::inspect(const std::string& path) {
  const LimitedChild::Answer answer = child_.answer(fmt::format("{}0 {}", char{kInspect}, path));
  const std::string damage = answer.damage(path);
  if (!damage.empty()) throw Error(ExitCode::kData, damage);
  ImageFile file;
  const auto head = head_of<FileHead>(answer.text, file.labels);
  const bool has_labels = !file.labels.empty();
  if (!head || head->images < 1 || (head->is_picture == 0 && !is_possible(head->shape)) ||
      (has_labels && file.labels.front() < 0) || !std::ranges::is_sorted(file.labels)) {
    throw Error(ExitCode::kData, answer.strange(path));
  }
  file.is_picture = head->is_picture != 0;
  file.images = head->images;
  file.shape = head->shape;
  return file;
}

void ImageDecoder::decode(const std::vector<WantedImage>& wanted,
                          const std::function<void(std::size_t, DecodedImage)>& take) {
  std::vector<std::string> requests;
  for (const WantedImage& image : wanted) {
    requests.push_back(fmt::format("{}{} {}", char{image.is_picture ? kPicture : kArray},
                                   image.image, image.path));
  }
  child_.answer(requests, [&](std::size_t i, const LimitedChild::Answer& answer) {
    DecodedImage decoded;
    decoded.damage = answer.damage(wanted[i].path);
    if (decoded.damage.empty()) {
      const auto head = head_of<ImageHead>(answer.text, decoded.image.pixels);
      if (head && is_possible(head->shape) &&
          std::ssize(decoded.image.pixels) == num_values(head->shape)) {
        decoded.image.shape = head->shape;
        decoded.label = head->label;
      } else {
        decoded.damage = answer.strange(wanted[i].path);
      }
    }
    take(i, std::move(decoded));
  });
}

}  // namespace birkhoff
