#include "cluster/base/tensors/tensor_region.h"

#include <c10/util/accumulate.h>
#include <c10/util/strides.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "cluster/base/error.h"

namespace birkhoff {

bool TensorRegion::is_whole() const {
  return has_whole_box() && flat_begin == 0 && flat_end == c10::multiply_integers(box_size);
}

std::string region_defect(const TensorRegion& region) {
  const std::size_t dims = region.global_shape.size();
  if (region.box_offset.size() != dims || region.box_size.size() != dims) {
    return fmt::format("its box has {} offsets and {} sizes for {} dimensions",
                       region.box_offset.size(), region.box_size.size(), dims);
  }
  std::int64_t box_elements = 1, global_elements = 1;
  for (std::size_t d = 0; d < dims; ++d) {
    const std::int64_t global = region.global_shape[d], offset = region.box_offset[d],
                       size = region.box_size[d];
    if (global < 0 || offset < 0 || size < 0 || offset > global || size > global - offset) {
      return fmt::format(
          "its box leaves the tensor: dimension {} has size {}, box offset {}, box size {}", d,
          global, offset, size);
    }
    if (__builtin_mul_overflow(box_elements, size, &box_elements) ||
        __builtin_mul_overflow(global_elements, global, &global_elements)) {
      return fmt::format("its shape [{}] overflows 64 bits", fmt::join(region.global_shape, ", "));
    }
  }
  if (region.flat_begin < 0 || region.flat_end < region.flat_begin ||
      region.flat_end > box_elements) {
    return fmt::format("its range [{}, {}) leaves its box of {} elements", region.flat_begin,
                       region.flat_end, box_elements);
  }
  return "";
}

void for_each_common_run(const TensorRegion& a, const TensorRegion& b,
                         const std::function<void(const CommonRun&)>& visit) {
  require(a.global_shape == b.global_shape, "regions of tensors of different shapes");
  const std::size_t dims = a.global_shape.size();
  std::vector<std::int64_t> begin(dims), end(dims);  // the common box
  for (std::size_t d = 0; d < dims; ++d) {
    begin[d] = std::max(a.box_offset[d], b.box_offset[d]);
    end[d] = std::min(a.box_offset[d] + a.box_size[d], b.box_offset[d] + b.box_size[d]);
    if (begin[d] >= end[d]) {
      return;
    }
  }
  // A run spans the dimensions [outer, dims): inner dimensions that both boxes hold in full, and
  // one more.
  std::size_t outer = dims;
  std::int64_t run_length = 1;
  while (outer > 0) {
    --outer;
    const std::int64_t size = end[outer] - begin[outer];
    run_length *= size;
    if (size != a.box_size[outer] || size != b.box_size[outer]) {
      break;
    }
  }
  std::int64_t num_runs = 1;
  for (std::size_t d = 0; d < outer; ++d) num_runs *= end[d] - begin[d];
  const auto strides_a = c10::contiguous_strides(a.box_size),
             strides_b = c10::contiguous_strides(b.box_size);
  // Row-major positions, in the two boxes, of a run's first element; both increase with the run's
  // index.
  const auto position_of = [&](std::int64_t run) {
    std::pair<std::int64_t, std::int64_t> position{0, 0};
    for (std::size_t d = dims; d-- > 0;) {
      std::int64_t at = begin[d];
      if (d < outer) {
        at += run % (end[d] - begin[d]);
        run /= end[d] - begin[d];
      }
      position.first += (at - a.box_offset[d]) * strides_a[d];
      position.second += (at - b.box_offset[d]) * strides_b[d];
    }
    return position;
  };
  // The first run that lies before neither flat range: a forged manifest can have boxes of 2^62
  // runs, of which the ranges hold a few.
  std::int64_t first_run = 0, past = num_runs;
  while (first_run < past) {
    const std::int64_t middle = first_run + (past - first_run) / 2;
    const auto [run_a, run_b] = position_of(middle);
    if (run_a + run_length <= a.flat_begin || run_b + run_length <= b.flat_begin) {
      first_run = middle + 1;
    } else {
      past = middle;
    }
  }
  for (std::int64_t run = first_run; run < num_runs; ++run) {
    const auto [run_a, run_b] = position_of(run);
    if (run_a >= a.flat_end || run_b >= b.flat_end) return;
    const std::int64_t first =
        std::max({std::int64_t{0}, a.flat_begin - run_a, b.flat_begin - run_b});
    const std::int64_t last = std::min({run_length, a.flat_end - run_a, b.flat_end - run_b});
    if (first < last) {
      visit({run_a + first - a.flat_begin, run_b + first - b.flat_begin, last - first});
    }
  }
}

}  // namespace birkhoff
