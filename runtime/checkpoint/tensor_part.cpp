#include "runtime/checkpoint/tensor_part.h"

#include <c10/util/accumulate.h>
#include <c10/util/strides.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "cluster/base/error.h"

namespace birkhoff {

TensorPart whole_part(std::string name, StateKind kind, const at::Tensor& tensor, int owner) {
  require(tensor.is_contiguous(), "a whole part needs a contiguous tensor");
  TensorPart part;
  part.name = std::move(name);
  part.kind = kind;
  part.region.global_shape = tensor.sizes().vec();
  part.region.box_offset.assign(part.region.global_shape.size(), 0);
  part.region.box_size = part.region.global_shape;
  part.region.flat_end = tensor.numel();
  part.owner = owner;
  part.data = tensor.detach().view({-1});
  return part;
}

std::vector<TensorPart> placed_parts(const std::string& name, StateKind kind,
                                     const TensorPlacement& placement, Interval range,
                                     const at::Tensor& data_n) {
  std::vector<TensorPart> parts;
  const auto add = [&](const TensorBox& box, Interval of_box, std::int64_t first) {
    TensorPart& part = parts.emplace_back();
    part.name = name;
    part.kind = kind;
    part.region = {.global_shape = placement.global_shape,
                   .box_offset = box.offset,
                   .box_size = box.size,
                   .flat_begin = of_box.begin,
                   .flat_end = of_box.end};
    part.data = data_n.narrow(0, first, of_box.size());
  };
  std::int64_t begin = 0;  // of the box
  for (const TensorBox& box : placement.boxes) {
    const std::int64_t end = begin + c10::multiply_integers(box.size);
    const Interval common{std::max(begin, range.begin), std::min(end, range.end)};
    if (common.size() > 0) {
      add(box, {common.begin - begin, common.end - begin}, common.begin - range.begin);
    }
    begin = end;
  }
  if (parts.empty()) add(placement.boxes[0], {0, 0}, 0);
  return parts;
}

std::vector<int> balanced_owners(const std::vector<std::int64_t>& bytes, int num_ranks) {
  std::vector<std::size_t> largest_first(bytes.size());
  std::iota(largest_first.begin(), largest_first.end(), std::size_t{0});
  std::ranges::stable_sort(largest_first, std::greater<>(),
                           [&](std::size_t i) { return bytes[i]; });
  std::vector<std::int64_t> load_bytes(static_cast<std::size_t>(num_ranks), 0);
  std::vector<int> owners(bytes.size());
  for (const std::size_t i : largest_first) {
    const auto least = std::ranges::min_element(load_bytes);
    owners[i] = static_cast<int>(least - load_bytes.begin());
    *least += bytes[i];
  }
  return owners;
}

void balance_owners(std::vector<TensorPart>& parts, int num_ranks) {
  std::vector<std::int64_t> bytes;
  for (const TensorPart& part : parts) {
    // Of the whole tensor, because ranks may have parts of different sizes.
    bytes.push_back(c10::multiply_integers(part.region.global_shape) * part.data.element_size());
  }
  const std::vector<int> owners = balanced_owners(bytes, num_ranks);
  for (std::size_t i = 0; i < parts.size(); ++i) parts[i].owner = owners[i];
}

}  // namespace birkhoff
