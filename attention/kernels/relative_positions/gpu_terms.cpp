#include "attention/kernels/relative_positions/gpu_terms.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <limits>

namespace birkhoff {
namespace {

at::Tensor as_floats(const at::Tensor& x) { return x.to(at::kFloat); }

// x . table_r for each row: [B, H, L, R].
at::Tensor products(const at::Tensor& x_BHLD, const at::Tensor& table_HRD) {
  return at::matmul(as_floats(x_BHLD), table_HRD.transpose(1, 2)).contiguous();
}

at::Tensor numbers_like(const at::Tensor& scores_BHLR, std::int64_t places, float value) {
  return at::full({scores_BHLR.size(0), scores_BHLR.size(1), places, scores_BHLR.size(3)}, value,
                  scores_BHLR.options());
}

float* data_of(const at::Tensor& x) { return x.defined() ? x.mutable_data_ptr<float>() : nullptr; }

// The tables' rows that these distances reach.
DistanceTerms rows_in_reach(const RelativePositions& relative, std::int64_t lowest,
                            std::int64_t highest) {
  const auto row_of = [&](std::int64_t distance) {
    return std::clamp<std::int64_t>(distance - relative.least, 0, relative.num_distances() - 1);
  };
  DistanceTerms terms;
  terms.first = row_of(lowest);
  // A table beyond all distances has one such row; any distance will do for it.
  terms.least = std::clamp(relative.least + terms.first, lowest, highest);
  const std::int64_t count = row_of(highest) - terms.first + 1;
  terms.keys_HRD = as_floats(relative.keys_HRD.narrow(1, terms.first, count));
  if (relative.values_HRD.defined()) {
    terms.values_HRD = as_floats(relative.values_HRD.narrow(1, terms.first, count));
  }
  if (relative.bias_HR.defined()) terms.bias_HR = relative.bias_HR.narrow(1, terms.first, count);
  return terms;
}

at::Tensor scores(const DistanceTerms& terms, const at::Tensor& q_BHLD) {
  at::Tensor scores_BHLR = products(q_BHLD, terms.keys_HRD);
  if (terms.bias_HR.defined()) scores_BHLR.add_(terms.bias_HR.unsqueeze(1));
  return scores_BHLR;
}

// The table's gradient: `factor` times the products of numbers with the rows of x of each sequence,
// or without x with ones.
at::Tensor table_gradient(const DistanceTerms& terms, const at::Tensor& numbers_BHLR,
                          const at::Tensor& x_BHLD, double factor, const at::Tensor& table_HRD) {
  at::Tensor gradient_HRD = at::zeros_like(table_HRD);
  if (!terms.defined()) return gradient_HRD;
  const at::Tensor sums_BHRD = x_BHLD.defined()
                                   ? at::matmul(numbers_BHLR.transpose(2, 3), as_floats(x_BHLD))
                                   : numbers_BHLR.sum(2).unsqueeze(3);
  const std::int64_t rows = numbers_BHLR.size(3);
  gradient_HRD.narrow(1, terms.first, rows)
      .copy_(gradient_of_table(sums_BHRD, table_HRD.narrow(1, terms.first, rows), factor));
  return gradient_HRD;
}

}  // namespace

DistanceParams DistanceTerms::params() const {
  if (!defined()) return {};
  return {.scores = data_of(scores_BHLR),
          .of_values = data_of(of_values_BHLR),
          .p = data_of(p_BHPR),
          .d_s = data_of(d_s_BHPR),
          .rows = static_cast<int>(scores_BHLR.size(3)),
          .least = static_cast<int>(least)};
}

DistanceTerms forward_terms(const RelativePositions& relative, std::int64_t lowest,
                            std::int64_t highest, const at::Tensor& q_BHLD, std::int64_t places) {
  if (!relative.defined()) return {};
  DistanceTerms terms = rows_in_reach(relative, lowest, highest);
  terms.scores_BHLR = scores(terms, q_BHLD);
  if (terms.values_HRD.defined()) {
    terms.p_BHPR = numbers_like(terms.scores_BHLR, places, -std::numeric_limits<float>::infinity());
  }
  return terms;
}

void add_values(const DistanceTerms& terms, const at::Tensor& out_BHPD) {
  if (terms.p_BHPR.defined()) out_BHPD.add_(at::matmul(terms.p_BHPR, terms.values_HRD));
}

DistanceTerms backward_terms(const RelativePositions& relative, std::int64_t lowest,
                             std::int64_t highest, const at::Tensor& q_BHLD,
                             const at::Tensor& d_out_BHLD, std::int64_t places) {
  if (!relative.defined()) return {};
  DistanceTerms terms = rows_in_reach(relative, lowest, highest);
  terms.scores_BHLR = scores(terms, q_BHLD);
  terms.d_s_BHPR = numbers_like(terms.scores_BHLR, places, 0);
  if (terms.values_HRD.defined()) {
    terms.of_values_BHLR = products(d_out_BHLD, terms.values_HRD);
    terms.p_BHPR = numbers_like(terms.scores_BHLR, places, 0);
  }
  return terms;
}

TableGradients add_term_gradients(const RelativePositions& relative, const DistanceTerms& terms,
                                  const at::Tensor& q_BHLD, const at::Tensor& d_out_BHLD,
                                  double scale, const at::Tensor& d_q_BHLD) {
  if (!relative.defined()) return {};
  if (terms.defined()) d_q_BHLD.add_(at::matmul(terms.d_s_BHPR, terms.keys_HRD), scale);
  TableGradients gradients{
      .d_keys_HRD = table_gradient(terms, terms.d_s_BHPR, q_BHLD, scale, relative.keys_HRD),
      .d_values_HRD = {},
      .d_bias_HR = {}};
  if (relative.values_HRD.defined()) {
    gradients.d_values_HRD =
        table_gradient(terms, terms.p_BHPR, d_out_BHLD, 1, relative.values_HRD);
  }
  if (relative.bias_HR.defined()) {
    gradients.d_bias_HR =
        table_gradient(terms, terms.d_s_BHPR, {}, scale, relative.bias_HR.unsqueeze(2)).squeeze(2);
  }
  return gradients;
}

}  // namespace birkhoff
