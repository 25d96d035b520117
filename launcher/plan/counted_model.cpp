#include "launcher/plan/counted_model.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "launcher/bench/peak_memory.h"
#include "launcher/bench/synthetic_training.h"

namespace birkhoff {
namespace {

using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

at::Tensor index_select(const at::Tensor& x, std::int64_t dim, const at::Tensor& index) {
  std::vector<std::int64_t> shape = x.sizes().vec();
  shape[static_cast<std::size_t>(dim)] = index.numel();
  return at::empty(shape, x.options());
}

at::Tensor embedding_dense_backward(const at::Tensor& gradient, const at::Tensor&,
                                    std::int64_t num_rows, std::int64_t, bool) {
  return at::empty({num_rows, gradient.size(-1)}, gradient.options());
}

// With mean and 1 / standard deviation of each row.
Three layer_norm(const at::Tensor& x, at::IntArrayRef normed, const std::optional<at::Tensor>&,
                 const std::optional<at::Tensor>&, double) {
  std::vector<std::int64_t> rows = x.sizes().vec();
  std::fill(rows.end() - static_cast<std::ptrdiff_t>(normed.size()), rows.end(), 1);
  return {at::empty_like(x), at::empty(rows, x.options()), at::empty(rows, x.options())};
}

Three layer_norm_backward(const at::Tensor&, const at::Tensor& x, at::IntArrayRef,
                          const at::Tensor&, const at::Tensor&,
                          const std::optional<at::Tensor>& weight,
                          const std::optional<at::Tensor>& bias, std::array<bool, 3> needed) {
  const auto gradient = [](bool wanted, const at::Tensor& of) {
    return wanted ? at::empty_like(of) : at::Tensor();
  };
  return {gradient(needed[0], x), gradient(needed[1], weight.value_or(at::Tensor())),
          gradient(needed[2], bias.value_or(at::Tensor()))};
}

at::Tensor& logical_not(const at::Tensor& x, at::Tensor& out) {
  out.resize_(x.sizes());
  return out;
}

// LibTorch has the shapes of these operations only in Python.
TORCH_LIBRARY_IMPL(aten, Meta, library) {
  library.impl("index_select", &index_select);
  library.impl("embedding_dense_backward", &embedding_dense_backward);
  library.impl("logical_not.out", &logical_not);
  library.impl("native_layer_norm", &layer_norm);
  library.impl("native_layer_norm_backward", &layer_norm_backward);
}

}  // namespace

CountedModel::CountedModel(const configs::Config& config, std::int64_t vocabulary,
                           c10::Device device)
    : config_(config),
      vocabulary_(vocabulary),
      device_(device),
      one_(make_single_group(device)),
      model_(make_model(config, synthetic_inputs(config, vocabulary), {*one_, *one_, *one_})),
      buckets_(model_->parameters(), *one_, config.train().bucket_elements()) {}

Batch CountedModel::batch(std::int64_t sequences) const {
  configs::Config config = config_;
  config.mutable_train()->set_global_batch(static_cast<int>(sequences));
  return synthetic_batch(config, vocabulary_, device_);
}

CountedModel::Bytes CountedModel::train(std::int64_t sequences) {
  PeakMemory memory(device_);
  const Batch on = batch(sequences);
  const NoiseKey noise{config_.train().seed(), at::zeros({1}, on.sample_ids_B.options()), 0,
                       on.sample_ids_B, on.global_size};
  Bytes bytes;
  memory.restart();
  {
    const LossSums sums = model_->loss_sums(on, noise);
    bytes.kept = static_cast<double>(memory.live_bytes());
    sums.loss.backward();
  }
  bytes.peak = static_cast<double>(memory.extra_bytes());
  return bytes;
}

double CountedModel::evaluate(std::int64_t sequences) {
  PeakMemory memory(device_);
  const Batch on = batch(sequences);
  const at::NoGradGuard no_gradients;
  memory.restart();
  model_->loss_sums(on, std::nullopt);
  return static_cast<double>(memory.extra_bytes());
}

ModelSize size_of_model(const configs::Config& config, std::int64_t vocabulary) {
  const auto one = make_single_group(at::kMeta);
  const auto model = make_model(config, synthetic_inputs(config, vocabulary), {*one, *one, *one});
  return {model->forward_flops_per_sequence(),
          static_cast<double>(model->parameters().num_elements())};
}

}  // namespace birkhoff
