// Regions of a tensor: flat ranges inside boxes, and the elements that two regions share.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace birkhoff {

// Elements of a global tensor: a flat range inside a box.
struct TensorRegion {
  std::vector<std::int64_t> global_shape, box_offset, box_size;  // one entry per dimension
  std::int64_t flat_begin = 0, flat_end = 0;                     // row-major inside the box

  std::int64_t num_elements() const { return flat_end - flat_begin; }
  // Whether the box is the whole tensor; and whether the range also is the whole box.
  bool has_whole_box() const { return box_size == global_shape; }
  bool is_whole() const;
};

// The defect that makes a region impossible (a box that exceeds the tensor, a range that exceeds
// the box, a size that overflows 64 bits); empty if it is valid. For regions that were read from a
// file.
std::string region_defect(const TensorRegion& region);

// `length` elements that two regions share, consecutive in both; positions count from each part's
// data[0].
struct CommonRun {
  std::int64_t begin_a = 0, begin_b = 0, length = 0;
};

// Calls `visit` for runs that together are the intersection of two valid regions of one global
// tensor, each element once.
void for_each_common_run(const TensorRegion& a, const TensorRegion& b,
                         const std::function<void(const CommonRun&)>& visit);

}  // namespace birkhoff
