#include "cluster/base/tensors/placement.h"

#include "cluster/base/collectives/process_group.h"
#include "cluster/base/error.h"

namespace birkhoff {

ModelPlacement::ModelPlacement(at::Device of_rank, ProcessGroup* group, ProcessGroup* replicas)
    : device(of_rank), data(replicas) {
  if (group == nullptr || group->size() == 1) return;
  tensor = group;
  tensor_rank = group->rank();
  tensor_size = group->size();
}

TensorPlacement place_tensor(std::vector<std::int64_t> global_shape, const Split& split, int rank,
                             int size) {
  const TensorBox whole{std::vector<std::int64_t>(global_shape.size()), global_shape};
  TensorPlacement placement{std::move(global_shape), {}};
  if (split.dim < 0 || size == 1) {
    placement.boxes = {whole};
    return placement;
  }
  const auto dim = static_cast<std::size_t>(split.dim);
  std::vector<Interval> sections = split.sections;
  if (sections.empty()) sections.push_back({0, placement.global_shape.at(dim)});
  require(sections.size() == 1 || dim == 0, "several ranges are divided in dimension 0 only");
  for (const Interval& section : sections) {
    const Interval mine = partition(section.size(), rank, size);
    TensorBox box = whole;
    box.offset[dim] = section.begin + mine.begin;
    box.size[dim] = mine.size();
    placement.boxes.push_back(std::move(box));
  }
  return placement;
}

std::vector<std::int64_t> local_shape(const TensorPlacement& placement) {
  std::vector<std::int64_t> shape = placement.boxes.at(0).size;
  for (std::size_t i = 1; i < placement.boxes.size(); ++i) shape[0] += placement.boxes[i].size[0];
  return shape;
}

}  // namespace birkhoff
