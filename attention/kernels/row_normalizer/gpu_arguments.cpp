#include "attention/kernels/row_normalizer/gpu_arguments.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/kernels/common/fitting_rows.h"
#include "attention/kernels/counting_sort/counting_sort.h"
#include "cluster/base/gpu/device.h"

namespace birkhoff {
namespace {

void set_rows(const RowTensors& x, const SavedRows& saved, RowAttentionParams& params) {
  const auto rows = [](const at::Tensor& each) {
    return each.defined() ? rows_params(each) : RowsParams{};
  };
  const at::Tensor& q = x.q_BHLD;
  params.dtype = kernel_dtype(q);
  params.batch = static_cast<int>(q.size(0));
  params.heads = static_cast<int>(q.size(1));
  params.queries = static_cast<int>(q.size(2));
  params.keys = static_cast<int>(x.k_BHSD.size(2));
  params.head_dim = static_cast<int>(q.size(3));
  params.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(q.size(3))));
  params.first = saved.first_BL.const_data_ptr<std::int32_t>();
  params.end = saved.end_BL.const_data_ptr<std::int32_t>();
  params.q = rows(q);
  params.k = rows(x.k_BHSD);
  params.v = rows(x.v_BHSD);
  params.out = rows(x.out_BHLD);
  params.d_out = rows(x.d_out_BHLD);
  params.d_q = rows(x.d_q_BHLD);
  params.d_k = rows(x.d_k_BHSD);
  params.d_v = rows(x.d_v_BHSD);
  if (x.terms_BHLS.defined()) params.terms = x.terms_BHLS.const_data_ptr<float>();
  if (x.d_terms_BHLS.defined()) params.d_terms = x.d_terms_BHLS.mutable_data_ptr<float>();
}

}  // namespace

std::string why_not_gpu_rows(const RowAttention& in) {
  const at::Tensor& q = in.q_BHLD;
  if (in.drops()) return "sparse normalizers with dropout have no GPU kernel";
  std::string why = why_not_dtype(q.scalar_type(), {at::kBFloat16, at::kHalf});
  if (why.empty()) why = why_not_head_dim(q.size(3), RowAttentionParams::kMaxHeadDim);
  if (!why.empty()) return why;
  if (q.size(3) % 8 != 0) {
    return fmt::format("a head has {} channels, which are no multiple of 8", q.size(3));
  }
  // Bounds the number of rows, and of elements of a head's lists.
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() - 1024;
  const std::int64_t rows = std::max(q.size(2), in.k_BHSD.size(2)),
                     list = in.normalizer.kind == Normalizer::kTopK ? max_kept(in) : 0;
  const bool fits = q.size(0) * q.size(1) * rows <= kMost / 8 && q.size(2) * list <= kMost;
  return fits ? "" : kTooManyRows;
}

RowArguments<TopKParams> top_k_arguments(const RowTensors& x, const SavedRows& saved) {
  RowArguments<TopKParams> arguments{};
  TopKParams& params = arguments.params;
  set_rows(x, saved, params);
  params.most = static_cast<int>(saved.index_BHLk.size(3));
  params.kept = saved.kept_BL.const_data_ptr<std::int32_t>();
  params.index = saved.index_BHLk.mutable_data_ptr<std::int32_t>();
  params.weight = saved.weight_BHLk.mutable_data_ptr<float>();
  if (!x.d_out_BHLD.defined()) return arguments;
  const SortedIndices slots = counting_sort(saved.index_BHLk.flatten(2), x.k_BHSD.size(2));
  arguments.tensors = {at::empty_like(saved.weight_BHLk), slots.order_BHP, slots.starts_BHR};
  params.d_score = arguments.tensors[0].mutable_data_ptr<float>();
  params.order = slots.order_BHP.const_data_ptr<std::int32_t>();
  params.starts = slots.starts_BHR.const_data_ptr<std::int32_t>();
  return arguments;
}

RowArguments<EntmaxParams> entmax_arguments(const RowTensors& x, const SavedRows& saved,
                                            const at::Tensor& d_alpha_BHL) {
  RowArguments<EntmaxParams> arguments{{}, {(saved.alpha_H - 1).to(at::kFloat)}};
  EntmaxParams& params = arguments.params;
  set_rows(x, saved, params);
  params.excess = arguments.tensors[0].const_data_ptr<float>();
  params.threshold = saved.threshold_BHL.mutable_data_ptr<float>();
  if (d_alpha_BHL.defined()) params.d_alpha = d_alpha_BHL.mutable_data_ptr<float>();
  if (!x.d_out_BHLD.defined()) return arguments;
  params.mean =
      arguments.tensors.emplace_back(at::empty_like(saved.threshold_BHL)).mutable_data_ptr<float>();
  return arguments;
}

}  // namespace birkhoff
