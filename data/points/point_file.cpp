#include "data/points/point_file.h"

#include <cmath>
#include <limits>

#include "cluster/base/error.h"
#include "data/corpus/hdf5.h"

namespace birkhoff {
namespace {

constexpr std::int64_t kMaxSets = 1 << 20;

std::vector<std::int64_t> read_labels(const ForeignHdf5& file, std::int64_t sets) {
  if (!file.has("label")) return {};
  Hdf5Values<std::int64_t> labels = file.integers("label", {1, 3}, kMaxSets);
  reject_if(labels.shape.size() > 1 && labels.shape[1] != 1,
            "its data set 'label' has {} labels of a set, not 1", labels.shape[1]);
  reject_if(labels.shape[0] != sets, "its data set 'label' has {} labels for {} sets",
            labels.shape[0], sets);
  for (std::int64_t i = 0; i < sets; ++i) {
    const std::int64_t label = labels.values[static_cast<std::size_t>(i)];
    // HDF5 makes a larger one the largest.
    reject_if(label < 0 || label == std::numeric_limits<std::int64_t>::max(),
              "the label {} of set {} is negative or above 2^63 - 2", label, i);
  }
  return std::move(labels.values);
}

}  // namespace

PointFile read_point_file(const std::string& path) {
  const ForeignHdf5 file(path);
  Hdf5Values<float> data = file.floats("data", {3, 4}, kMaxPointFileValues);
  reject_if(data.values.empty(), "its data set 'data' is empty ({} x {} x {})", data.shape[0],
            data.shape[1], data.shape[2]);
  PointFile points;
  points.shape = {data.shape[1], data.shape[2]};
  const auto row = static_cast<std::size_t>(data.shape[1] * data.shape[2]);
  for (std::size_t i = 0; i < data.values.size(); ++i) {
    reject_if(!std::isfinite(data.values[i]), "coordinate {} of point {} of set {} is {}",
              i % static_cast<std::size_t>(data.shape[2]),
              i % row / static_cast<std::size_t>(data.shape[2]), i / row, data.values[i]);
  }
  points.sets = data.shape[0];
  points.labels_N = read_labels(file, points.sets);
  points.values_NMP = std::move(data.values);
  return points;
}

}  // namespace birkhoff
