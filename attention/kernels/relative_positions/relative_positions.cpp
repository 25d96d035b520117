#include "attention/kernels/relative_positions/relative_positions.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>

#include "attention/kernels/common/fitting_rows.h"
#include "cluster/base/error.h"

namespace birkhoff {
namespace {

// The tables of all heads, or the one that they share, as [1, H, 1, R, D].
at::Tensor of_heads(const at::Tensor& table_HRD) { return table_HRD.unsqueeze(0).unsqueeze(2); }

at::Tensor expand_pairs(const at::Tensor& rows, const at::Tensor& x_BHXIn) {
  std::vector<std::int64_t> sizes = x_BHXIn.sizes().vec();
  sizes.back() = rows.size(-1);
  return rows.expand(sizes);
}

}  // namespace

RelativePositions RelativePositions::with_whole_columns() const {
  RelativePositions other = *this;
  for (at::Tensor* table : {&other.keys_HRD, &other.values_HRD}) {
    if (table->defined()) *table = birkhoff::with_whole_columns(*table);
  }
  return other;
}

void check_relative_positions(const RelativePositions& relative, const at::Tensor& q,
                              std::int64_t heads) {
  require(relative.defined() || !(relative.values_HRD.defined() || relative.bias_HR.defined()),
          "relative positions: without a table of keys there is neither one of values nor a bias");
  if (!relative.defined()) return;
  const at::Tensor &keys = relative.keys_HRD, &values = relative.values_HRD;
  require(keys.dim() == 3 && (keys.size(0) == 1 || keys.size(0) == heads) && keys.size(1) > 0 &&
              keys.size(2) == q.size(-1) && keys.scalar_type() == q.scalar_type() &&
              keys.device() == q.device(),
          "relative positions: the table of keys must be [1 or H, R, D], like the queries");
  require(!values.defined() ||
              (values.sizes() == keys.sizes() && values.scalar_type() == keys.scalar_type() &&
               values.device() == keys.device()),
          "relative positions: the table of values must be like that of keys");
  const at::Tensor& bias = relative.bias_HR;
  require(!bias.defined() || (bias.sizes() == keys.sizes().slice(0, 2) &&
                              bias.scalar_type() == at::toOpMathType(keys.scalar_type()) &&
                              bias.device() == keys.device()),
          "relative positions: the bias must be [1 or H, R] like the table of keys, in the type of "
          "sums");
}

at::Tensor table_rows(const RelativePositions& relative, const at::Tensor& distances) {
  return (distances - relative.least).clamp(0, relative.num_distances() - 1);
}

at::Tensor relative_scores(const RelativePositions& relative, const at::Tensor& q_BHXID,
                           const at::Tensor& rows_BHXIJ) {
  at::Tensor scores_BHXIR = at::matmul(q_BHXID, of_heads(relative.keys_HRD).transpose(-1, -2));
  if (relative.bias_HR.defined()) {
    scores_BHXIR =
        (scores_BHXIR + of_heads(relative.bias_HR.unsqueeze(1))).to(scores_BHXIR.scalar_type());
  }
  return scores_BHXIR.gather(-1, expand_pairs(rows_BHXIJ, scores_BHXIR));
}

at::Tensor relative_values(const RelativePositions& relative, const at::Tensor& p_BHXIJ,
                           const at::Tensor& rows_BHXIJ) {
  std::vector<std::int64_t> sizes = p_BHXIJ.sizes().vec();
  sizes.back() = relative.num_distances();
  const at::Tensor p_BHXIR = at::zeros(sizes, p_BHXIJ.options())
                                 .scatter_add(-1, expand_pairs(rows_BHXIJ, p_BHXIJ), p_BHXIJ);
  return at::matmul(p_BHXIR, of_heads(relative.values_HRD));
}

at::Tensor gradient_of_table(const at::Tensor& sums_NHRD, const at::Tensor& table_HRD,
                             double factor) {
  // In fp64, because these sums cancel strongly; one dim at a time, because a LibTorch sum over
  // several would depend on the number of threads.
  at::Tensor sums_HRD = sums_NHRD.sum(0, /*keepdim=*/false, at::kDouble);
  if (table_HRD.size(0) == 1) sums_HRD = sums_HRD.sum(0, /*keepdim=*/true);
  return (sums_HRD.narrow(1, 0, table_HRD.size(1)).narrow(2, 0, table_HRD.size(2)) * factor)
      .to(table_HRD.scalar_type());
}

}  // namespace birkhoff
