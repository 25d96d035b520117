// The memory that passes of a model on synthetic tokens take. Local.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>

#include "configs/schema/config.pb.h"
#include "launcher/measure/imitated_group.h"
#include "models/model.h"
#include "runtime/gradients/grad_buckets.h"

namespace birkhoff {

// Bytes of LibTorch's tensors on a rank of mesh.tensor, without parameters, gradients and the
// batch. On the CPU, passes use the kernels that a run would use. On the meta device they take no
// memory; it has all operations only for models without layers.
class CountedModel {
 public:
  // Error(kConfig) as make_model().
  CountedModel(const configs::Config& config, std::int64_t vocabulary, c10::Device device);

  struct Bytes {
    double kept = 0;  // after the forward pass
    double peak = 0;  // of forward and backward pass
    double temporary() const { return peak - kept; }
  };
  // Without an optimizer.
  Bytes train(std::int64_t sequences);
  // The peak of a forward pass without gradients.
  double evaluate(std::int64_t sequences);

 private:
  Batch batch(std::int64_t sequences) const;

  const configs::Config config_;
  const std::int64_t vocabulary_;
  const c10::Device device_;
  ImitatedMesh mesh_;  // of one data-parallel rank
  const std::unique_ptr<Model> model_;
  const GradBuckets buckets_;
};

// FLOPs of a sequence's forward pass, and elements of the parameters; found on the meta device. Of
// a rank of mesh.tensor: its share.
struct ModelSize {
  double flops = 0, elements = 0;
};
ModelSize size_of_model(const configs::Config& config, std::int64_t vocabulary);

}  // namespace birkhoff
