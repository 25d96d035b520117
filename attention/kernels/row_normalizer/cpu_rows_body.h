// The kernels of cpu_rows.h, compiled once for each instruction set.
#pragma once

#include "attention/kernels/row_normalizer/cpu_entmax_body.h"
#include "attention/kernels/row_normalizer/cpu_top_k_body.h"

namespace birkhoff {
namespace {

template <typename T>
constexpr RowKernels<T> kRowKernels{
    &TopKPasses<T>::scratch_bytes,   &top_k_forward<T>,  &top_k_backward<T>,
    &EntmaxPasses<T>::scratch_bytes, &entmax_forward<T>, &entmax_backward<T>};

}  // namespace
}  // namespace birkhoff
