// Makes files of point sets in memory, for tests: ModelNet40's HDF5 format.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/corpus/hdf5.h"

namespace birkhoff {

// Coordinate i of all sets is i / 8 - first.
inline std::vector<float> point_values(std::int64_t sets, std::int64_t points,
                                       std::int64_t coordinates, int first = 0) {
  std::vector<float> values;
  for (std::int64_t i = 0; i < sets * points * coordinates; ++i)
    values.push_back(static_cast<float>(i) / 8 - static_cast<float>(first));
  return values;
}

// The format's data sets, uncompressed. labels: of a set each.
inline std::string modelnet_of(const std::vector<float>& values, std::int64_t points,
                               std::int64_t coordinates, const std::vector<std::uint8_t>& labels) {
  const std::int64_t set = points * coordinates;
  std::vector<Hdf5DataSet> data_sets = {
      {.name = "data",
       .type = Hdf5Type::kF32,
       .shape = {static_cast<std::int64_t>(values.size()) / set, points, coordinates},
       .data = values.data()},
      {.name = "label",
       .type = Hdf5Type::kU8,
       .shape = {static_cast<std::int64_t>(labels.size()), 1},
       .data = labels.data()}};
  return hdf5_image(data_sets);
}

}  // namespace birkhoff
