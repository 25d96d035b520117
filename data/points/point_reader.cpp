#include "data/points/point_reader.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string_view>

#include "cluster/base/files/file.h"
#include "cluster/base/text/number_text.h"
#include "configs/loader/message_text.h"

namespace birkhoff {
namespace {

// A request is a number and a path: "17 path" for set 17, "- path" to inspect the file. Both
// processes are the same program, so answers are bytes of memory.
constexpr char kInspectSets[] = "-";

template <typename T>
void append(std::string& bytes, const T* values, std::size_t count) {
  bytes.append(reinterpret_cast<const char*>(values), count * sizeof(T));
}

// The values that the bytes hold.
template <typename T>
std::vector<T> values_of(std::string_view bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
  return values;
}

// Lives in the child.
class PointServer {
 public:
  std::string answer(const std::string& request) {
    const std::size_t space = request.find(' ');
    const std::string path = request.substr(space + 1);
    try {
      const PointFile& file = opened(path);
      if (request.substr(0, space) == kInspectSets) return head_of(file);
      const auto set =
          parse_number<std::int64_t>(std::string_view(request).substr(0, space)).value();
      reject_if(set >= file.sets, "has only {} sets: it changed", file.sets);
      std::string bytes;
      const std::int64_t label =
          file.labels_N.empty() ? -1 : file.labels_N[static_cast<std::size_t>(set)];
      append(bytes, &label, 1);
      const std::int64_t values = file.shape.points * file.shape.coordinates;
      append(bytes, file.values_NMP.data() + set * values, static_cast<std::size_t>(values));
      return bytes;
    } catch (const std::invalid_argument& error) {
      file_.reset();
      fail(ExitCode::kData, "{}: {}", path, printable(error.what()));
    }
  }

 private:
  static std::string head_of(const PointFile& file) {
    const std::int64_t sizes[] = {file.sets, file.shape.points, file.shape.coordinates};
    std::vector<std::int64_t> labels = file.labels_N;
    std::sort(labels.begin(), labels.end());
    labels.erase(std::unique(labels.begin(), labels.end()), labels.end());
    std::string bytes;
    append(bytes, sizes, std::size(sizes));
    append(bytes, labels.data(), labels.size());
    return bytes;
  }

  const PointFile& opened(const std::string& path) {
    if (!file_ || path_ != path) {
      file_.reset();              // first: two may not fit into memory
      File::open_for_read(path);  // throws errors of the file system, which HDF5 does not tell
      file_ = read_point_file(path);
      path_ = path;
    }
    return *file_;
  }

  std::string path_;  // of file_
  std::optional<PointFile> file_;
};

}  // namespace

PointReader::PointReader(ChildLimits limits)
    : child_([server = std::make_shared<PointServer>()](
                 const std::string& request) { return server->answer(request); },
             limits) {}

PointFileHead PointReader::inspect(const std::string& path) {
  const LimitedChild::Answer answer = child_.answer(fmt::format("{} {}", kInspectSets, path));
  const std::string damage = answer.damage(path);
  if (!damage.empty()) throw Error(ExitCode::kData, damage);
  const auto numbers = values_of<std::int64_t>(answer.text);
  const auto labels = std::span(numbers).subspan(std::min<std::size_t>(3, numbers.size()));
  const auto is_size = [](std::int64_t size) { return size >= 1 && size <= kMaxPointFileValues; };
  if (numbers.size() < 3 || (!labels.empty() && labels.front() < 0) ||
      !std::ranges::is_sorted(labels) ||
      !std::ranges::all_of(std::span(numbers).first(3), is_size) ||
      numbers[0] > kMaxPointFileValues / numbers[1] / numbers[2]) {
    throw Error(ExitCode::kData, answer.strange(path));
  }
  return {numbers[0], {numbers[1], numbers[2]}, {labels.begin(), labels.end()}};
}

void PointReader::read(const std::vector<WantedSet>& wanted,
                       const std::function<void(std::size_t, const PointSet&)>& take) {
  std::vector<std::string> requests;
  for (const WantedSet& set : wanted) requests.push_back(fmt::format("{} {}", set.set, set.path));
  child_.answer(requests, [&](std::size_t i, const LimitedChild::Answer& answer) {
    PointSet set;
    set.damage = answer.damage(wanted[i].path);
    if (set.damage.empty()) {
      const std::string_view bytes = answer.text;
      if (bytes.size() < sizeof set.label) {
        set.damage = answer.strange(wanted[i].path);
      } else {
        set.label = values_of<std::int64_t>(bytes.substr(0, sizeof set.label))[0];
        set.values = values_of<char>(bytes.substr(sizeof set.label));
      }
    }
    take(i, set);
  });
}

}  // namespace birkhoff
