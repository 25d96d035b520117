#include "models/point_cloud_transformer/offset_attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/softmax.h>

#include "configs/schema/config.pb.h"
#include "models/parallel/parameter_use.h"

namespace birkhoff {
namespace {

std::string offset_layer_name(std::int64_t number) { return "blocks." + std::to_string(number); }

Linear make_inner_linear(const configs::Config& config, std::int64_t outputs,
                         const std::string& name, Parameters& parameters) {
  return {without_bias(config),
          WeightRole::kInner,
          config.model().channels(),
          outputs,
          name,
          parameters};
}

}  // namespace

at::Tensor balanced_weights(const at::Tensor& scores_BNN, int half_steps) {
  constexpr std::int64_t kRows = 2, kColumns = 1;  // the dimensions over which they sum to 1
  at::Tensor log_BNN = scores_BNN;
  for (int left = half_steps - 1; left > 0; --left)
    log_BNN = at::log_softmax(log_BNN, left % 2 == 0 ? kRows : kColumns);
  return at::softmax(log_BNN, kRows);
}

OffsetAttention::OffsetAttention(const configs::Config& config, std::int64_t number,
                                 Parameters& parameters)
    : parameters_(parameters),
      unit_(parameters.begin_unit()),
      half_steps_(config.task().point_sets().point_cloud_transformer().half_steps()),
      channels_(config.model().channels()),
      query_(make_inner_linear(config, channels_ / 4,
                               offset_layer_name(number) + ".attention.query_key", parameters)),
      value_(make_inner_linear(config, channels_, offset_layer_name(number) + ".attention.value",
                               parameters)),
      output_(config, channels_, channels_, /*negative_slope=*/0,
              offset_layer_name(number) + ".attention.output", parameters) {}

at::Tensor OffsetAttention::operator()(const at::Tensor& x_BNC, bool training,
                                       NamedSums& sums) const {
  const ParameterUse use(parameters_, {unit_});
  const at::Tensor query_BND = query_(x_BNC), value_BNC = value_(x_BNC);
  // Sinkhorn normalization is in the parameters' dtype, products in the compute dtype.
  const at::Tensor scores_BNN =
      at::matmul(query_BND, query_BND.transpose(1, 2)).to(x_BNC.scalar_type());
  const at::Tensor weights_BNN =
      balanced_weights(scores_BNN, half_steps_).to(value_BNC.scalar_type());
  const at::Tensor offset_BNC = x_BNC - at::matmul(weights_BNN, value_BNC);
  return use.output(x_BNC + output_(offset_BNC, training, sums));
}

double OffsetAttention::forward_flops(std::int64_t num_points) const {
  const auto N = static_cast<double>(num_points), C = static_cast<double>(channels_);
  return N * (query_.flops() + value_.flops() + output_.flops()) + 2 * N * N * (C / 4 + C);
}

}  // namespace birkhoff
