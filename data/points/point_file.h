// A file of labeled point sets as of ModelNet40 (modelnet40_ply_hdf5_2048, of Qi et al. 2017,
// "PointNet", section 5.1): HDF5 with the data sets `data`, f32 [sets, points, coordinates], and
// `label`, integers [sets, 1] or [sets]. Damaged files may crash the library, so the product reads
// them in a child process (data/points/point_reader.h).
//
// Legend: N sets, M points, P coordinates.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace birkhoff {

// A file of ModelNet40 has 2,048 sets of 2,048 points: 12,582,912 values.
inline constexpr std::int64_t kMaxPointFileValues = 1 << 28;

struct PointShape {
  std::int64_t points = 0, coordinates = 0;
  bool operator==(const PointShape&) const = default;
};

struct PointFile {
  std::int64_t sets = 0;
  PointShape shape;
  std::vector<float> values_NMP;       // all finite
  std::vector<std::int64_t> labels_N;  // not negative; empty: the file has none
};

// Reads a whole file, of at most kMaxPointFileValues. std::invalid_argument says why it cannot be
// read.
PointFile read_point_file(const std::string& path);

}  // namespace birkhoff
