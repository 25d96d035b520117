#include "data/batch/batch.h"

#include <ATen/ops/narrow.h>

#include "cluster/base/error.h"

namespace birkhoff {

const at::Tensor& Batch::at(std::string_view name) const {
  const auto found = fields.find(name);
  if (found != fields.end()) return found->second;
  std::string names;
  for (const auto& entry : fields) names += (names.empty() ? "" : ", ") + entry.first;
  fail(ExitCode::kData, "batch has no field '{}'; it has: {}; choose a corpus that fits the task",
       name, names.empty() ? "none" : names);
}

Batch Batch::to(at::Device device) const {
  Batch moved;
  for (const auto& [name, tensor] : fields) moved.fields[name] = tensor.to(device);
  moved.sample_ids_B = sample_ids_B.to(device);
  moved.global_size = global_size;
  moved.num_documents = num_documents;
  return moved;
}

Batch Batch::narrow(std::int64_t begin, std::int64_t end) const {
  require(0 <= begin && begin <= end && end <= size(), "rows of a batch out of range");
  Batch rows;
  for (const auto& [name, tensor] : fields)
    rows.fields[name] = tensor.narrow(0, begin, end - begin);
  rows.sample_ids_B = sample_ids_B.narrow(0, begin, end - begin);
  rows.global_size = global_size;
  rows.num_documents = num_documents;
  return rows;
}

}  // namespace birkhoff
