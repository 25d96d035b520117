// Small PCTs and batches for them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tests/models/set_transformer/set_loops.h"

namespace birkhoff {

inline const std::string kPct = "task.point_sets.point_cloud_transformer.";
inline constexpr std::int64_t kCloud = 16;  // points

// Of sets of 16 points, of which 8 and 4 are kept, into 3 classes, in fp64.
inline configs::Config cloud_config(const std::vector<std::string>& settings = {}) {
  std::vector<std::string> all = {"model.bias=true"};
  all.insert(all.end(), settings.begin(), settings.end());
  return parse_config(
      "task { point_sets { classes: 3 point_cloud_transformer { neighbors: 4 } } } "
      "data { corpus: 'none' sequence_length: 16 } train { precision: fp64 global_batch: 12 } "
      "model { layers: 2 channels: 8 }",
      "test", all);
}

inline std::unique_ptr<Model> make_cloud_model(const std::vector<std::string>& settings = {},
                                               const ModelPlacement& place = at::kCPU) {
  auto model = make_model(cloud_config(settings), 0, place);
  set_values(model->parameters());
  return model;
}

inline Batch make_clouds(std::int64_t batch, std::int64_t seed = 1) {
  Batch sets;
  sets.fields["points"] = values_of({batch, kCloud, kCoordinates}, seed);
  sets.fields["labels"] = at::arange(batch, at::kLong).remainder(3);
  sets.sample_ids_B = at::arange(batch, at::kLong) + 100;
  return sets;
}

inline double most_different(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

}  // namespace birkhoff
