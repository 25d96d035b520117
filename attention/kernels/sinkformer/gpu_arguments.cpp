#include "attention/kernels/sinkformer/gpu_arguments.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/kernels/common/fitting_rows.h"
#include "cluster/base/error.h"
#include "cluster/base/gpu/device.h"

namespace birkhoff {
namespace {

float* floats_of(const at::Tensor& x) {
  require(x.is_contiguous(), "doubly stochastic attention: vectors must be contiguous");
  return x.mutable_data_ptr<float>();
}

RowsParams aligned(const at::Tensor& x) {
  require(has_aligned_rows(x), "doubly stochastic attention: rows must be aligned to 16 bytes");
  return rows_params(x);
}

SinkformerSide side_of(const at::Tensor& x, const at::Tensor& lengths_B) {
  SinkformerSide side{};
  side.size = static_cast<int>(x.size(2));
  side.rows = aligned(x);
  if (lengths_B.defined()) {
    require(lengths_B.is_contiguous(), "doubly stochastic attention: lengths must be contiguous");
    side.lengths = lengths_B.const_data_ptr<std::int64_t>();
  }
  return side;
}

SinkformerParams params_of(const HeadTensors& x, int half_steps,
                           const SinkformerVectors& potentials) {
  const at::Tensor& q = x.q_BHLD;
  SinkformerParams params{};
  params.dtype = kernel_dtype(q);
  params.batch = static_cast<int>(q.size(0));
  params.heads = static_cast<int>(q.size(1));
  params.head_dim = static_cast<int>(q.size(3));
  params.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(q.size(3))));
  params.half_steps = half_steps;
  params.queries = side_of(q, x.query_lengths_B);
  params.keys = side_of(x.k_BHSD, x.key_lengths_B);
  params.keys.values = aligned(x.v_BHSD);
  params.queries.potentials = floats_of(potentials.queries_BHtL);
  params.keys.potentials = floats_of(potentials.keys_BHtS);
  params.queries.vectors = half_steps / 2 + 1;
  params.keys.vectors = half_steps / 2;
  return params;
}

}  // namespace

std::string why_not_gpu_kernels(const DoublyStochasticAttention& in) {
  const at::Tensor& q = in.q_BHLD;
  const std::int64_t head_dim = q.size(3);
  if (in.same_document_BLS.defined()) return "each document is balanced on its own";
  if (in.dropout > 0 && in.noise) return "attention dropout has no such kernel";
  if (in.half_steps > 1 && in.gradient == BalanceGradient::kImplicit) {
    return "the implicit gradient has no GPU kernel";
  }
  std::string why = why_not_dtype(q.scalar_type(), {at::kBFloat16, at::kHalf});
  if (why.empty()) why = why_not_head_dim(head_dim, SinkformerParams::kMaxHeadDim);
  if (!why.empty()) return why;
  if (head_dim % 8 != 0) {
    return fmt::format("a head has {} channels, which are no multiple of 8", head_dim);
  }
  // Bounds the number of tiles and the number of rows, which are rounded up to whole tiles.
  const std::int64_t rows = q.size(0) * q.size(1) * std::max(q.size(2), in.k_BHSD.size(2));
  return rows <= std::numeric_limits<std::int32_t>::max() - kTileRows ? "" : kTooManyRows;
}

SinkformerVectors new_sinkformer_vectors(const HeadTensors& x, int half_steps) {
  const auto vectors = [](const at::Tensor& of, int count) {
    return at::empty({of.size(0), of.size(1), count, side_of(of, {}).padded()},
                     of.options().dtype(at::kFloat));
  };
  return {vectors(x.q_BHLD, half_steps / 2 + 1), vectors(x.k_BHSD, half_steps / 2)};
}

SinkformerParams sinkformer_params(const HeadTensors& x, int half_steps,
                                   const SinkformerVectors& potentials) {
  SinkformerParams params = params_of(x, half_steps, potentials);
  params.out = aligned(x.out_BHLD);
  return params;
}

SinkformerParams sinkformer_params(const HeadTensors& x, int half_steps,
                                   const SinkformerVectors& potentials, bool unrolled,
                                   const SinkformerVectors& coefficients) {
  SinkformerParams params = params_of(x, half_steps, potentials);
  params.unrolled = unrolled;
  params.queries.values = aligned(x.d_out_BHLD);
  params.queries.d_rows = aligned(x.d_q_BHLD);
  params.keys.d_rows = aligned(x.d_k_BHSD);
  params.d_v = aligned(x.d_v_BHSD);
  params.queries.coefficients = floats_of(coefficients.queries_BHtL);
  params.keys.coefficients = floats_of(coefficients.keys_BHtS);
  return params;
}

}  // namespace birkhoff
