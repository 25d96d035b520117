#include "data/prepare/points/prepare_points.h"

#include "data/prepare/records/prepare_records.h"

namespace birkhoff {

PrepareResult prepare_points(const PrepareOptions& given, const PointOptions& points,
                             const std::function<void(const PrepareProgress&)>& progress,
                             ProcessGroup* ranks) {
  PrepareOptions options = given;
  for (auto* paths : {&options.paths, &options.valid_paths, &options.test_paths})
    *paths = without_lists(*paths);
  const auto make = [&](const RecordInput::Context& context) {
    return std::make_unique<PointInput>(points, context);
  };
  return prepare_records(options, points, kPointNouns, make, progress, ranks);
}

}  // namespace birkhoff
