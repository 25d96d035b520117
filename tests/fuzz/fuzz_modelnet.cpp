#include <cmath>

#include "data/points/point_reader.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_targets.h"

namespace birkhoff {

void fuzz_modelnet(std::string_view input) {
  static const TemporaryFolder folder;
  // A file may take little time, so that an endless loop in the library is a short test.
  static PointReader reader({.cpu_seconds = 5, .wall_seconds = 20, .more_bytes = 1 << 30});
  const std::string path = write_input(folder, "x.h5", input);
  is_accepted(ExitCode::kData, [&] {
    const PointFileHead head = reader.inspect(path);
    const auto [points, coordinates] = head.shape;
    expect_promise(head.sets > 0 && points > 0 && coordinates > 0, "a file has points");
    expect_promise(!head.labels.empty() && head.labels.front() >= 0, "labels are not negative");
    const std::int64_t last = head.sets - 1;
    reader.read({{path, 0}, {path, last / 2}, {path, last}},
                [&, bytes = 4 * points * coordinates](std::size_t, const PointSet& set) {
                  expect_promise(set.damage.empty(), "every set of an accepted file can be read");
                  expect_promise(std::ssize(set.values) == bytes, "a set has all its values");
                  for (std::size_t at = 0; at < set.values.size(); at += 4) {
                    float value;
                    std::memcpy(&value, set.values.data() + at, 4);
                    expect_promise(std::isfinite(value), "coordinates are finite");
                  }
                });
  });
}

}  // namespace birkhoff
