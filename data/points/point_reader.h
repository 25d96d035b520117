// Reads files of point sets in a limited child process, because the library that parses them may
// crash on damaged ones.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cluster/base/files/sandboxed_child.h"
#include "data/points/point_file.h"

namespace birkhoff {

// What a file holds.
struct PointFileHead {
  std::int64_t sets = 0;
  PointShape shape;
  std::vector<std::int64_t> labels;  // the different ones, ascending; empty: the file has none
};

struct WantedSet {
  std::string path;
  std::int64_t set = 0;
};

struct PointSet {
  std::string damage;        // not empty: why there is no set, beginning with the path
  std::int64_t label = -1;   // -1: the file has none
  std::vector<char> values;  // f32 [points, coordinates]
};

class PointReader {
 public:
  // limits: what a file may take.
  explicit PointReader(ChildLimits limits = kLimits);

  // Reads the whole file. Error(kData) that begins with the path: it cannot be read.
  PointFileHead inspect(const std::string& path);
  // Calls take(i, set) for each, in order. The child holds the last file in memory. Errors of the
  // file system and of the machine (it ended the child twice) are thrown.
  void read(const std::vector<WantedSet>& wanted,
            const std::function<void(std::size_t i, const PointSet& set)>& take);

  // The values of a file are at most 1 GiB.
  static constexpr ChildLimits kLimits = {
      .cpu_seconds = 120, .wall_seconds = 600, .more_bytes = std::int64_t{2} << 30};

 private:
  LimitedChild child_;
};

}  // namespace birkhoff
