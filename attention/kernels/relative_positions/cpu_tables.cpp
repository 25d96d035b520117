#include "attention/kernels/relative_positions/cpu_tables.h"

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/TypeCast.h>

namespace birkhoff {
namespace {

template <typename T>
constexpr at::ScalarType kSums = c10::CppTypeToScalarType<Sum<T>>::value;

// x [H, rows, columns] in the type of sums, with rows of whole_columns().
template <typename T>
at::Tensor with_whole_rows(const at::Tensor& x) {
  const int columns = static_cast<int>(x.size(2));
  return at::constant_pad_nd(x.detach().to(kSums<T>), {0, whole_columns<T>(columns) - columns})
      .contiguous();
}

// The matrix of one head; x may have one for all.
template <typename T>
Sum<T>* matrix_of(const at::Tensor& x, std::int64_t head) {
  if (!x.defined()) return nullptr;
  return x.mutable_data_ptr<Sum<T>>() + (x.size(-3) == 1 ? 0 : head) * x.stride(-3);
}

}  // namespace

template <typename T>
DistanceTables<T>::DistanceTables(const RelativePositions& relative) : relative_(relative) {
  if (!relative.defined()) return;
  num_distances_ = static_cast<int>(relative.num_distances());
  keys_HRD_ = with_whole_rows<T>(relative.keys_HRD);
  keys_t_HDR_ = with_whole_rows<T>(relative.keys_HRD.transpose(1, 2));
  if (relative.bias_HR.defined()) bias_H1R_ = with_whole_rows<T>(relative.bias_HR.unsqueeze(1));
  if (!relative.values_HRD.defined()) return;
  values_HRD_ = with_whole_rows<T>(relative.values_HRD);
  values_t_HDR_ = with_whole_rows<T>(relative.values_HRD.transpose(1, 2));
}

template <typename T>
void DistanceTables<T>::start_gradients(std::int64_t parts, std::int64_t heads) {
  if (num_distances_ == 0) return;
  d_keys_PHRD_ = at::zeros({parts, heads, whole_columns<T>(num_distances_), keys_HRD_.size(2)},
                           keys_HRD_.options());
  if (values_HRD_.defined()) d_values_PHRD_ = at::zeros_like(d_keys_PHRD_);
  if (bias_H1R_.defined()) {
    d_bias_PH1R_ = at::zeros({parts, heads, 1, bias_H1R_.size(2)}, bias_H1R_.options());
  }
}

template <typename T>
TileDistances<T> DistanceTables<T>::of(std::int64_t head, std::int64_t part) const {
  const auto sums_of = [&](const at::Tensor& sums_PHRD) -> Sum<T>* {
    return sums_PHRD.defined() ? matrix_of<T>(sums_PHRD, head) + part * sums_PHRD.stride(0)
                               : nullptr;
  };
  return {.least = static_cast<int>(relative_.least),
          .num_distances = num_distances_,
          .keys = matrix_of<T>(keys_HRD_, head),
          .keys_t = matrix_of<T>(keys_t_HDR_, head),
          .values = matrix_of<T>(values_HRD_, head),
          .values_t = matrix_of<T>(values_t_HDR_, head),
          .bias = matrix_of<T>(bias_H1R_, head),
          .d_keys = sums_of(d_keys_PHRD_),
          .d_values = sums_of(d_values_PHRD_),
          .d_bias = sums_of(d_bias_PH1R_)};
}

template <typename T>
typename DistanceTables<T>::Gradients DistanceTables<T>::gradients(double key_factor,
                                                                   double value_factor) const {
  const auto gradient = [&](const at::Tensor& sums_PHRD, const at::Tensor& table, double factor) {
    return sums_PHRD.defined() ? gradient_of_table(sums_PHRD, table, factor) : at::Tensor();
  };
  Gradients gradients{gradient(d_keys_PHRD_, relative_.keys_HRD, key_factor),
                      gradient(d_values_PHRD_, relative_.values_HRD, value_factor),
                      {}};
  if (bias_H1R_.defined()) {
    gradients.d_bias_HR =
        gradient(d_bias_PH1R_, relative_.bias_HR.unsqueeze(1), key_factor).squeeze(1);
  }
  return gradients;
}

template class DistanceTables<float>;
template class DistanceTables<double>;
template class DistanceTables<Bf16>;

}  // namespace birkhoff
