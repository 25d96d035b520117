// A problem of one head for kernels that take an AttentionHead. Legend: L queries, S keys, D head
// dim.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "attention/kernels/tile_attention/cpu_head.h"
#include "tests/attention/mechanisms/mechanism_cases.h"

namespace birkhoff::test {

struct HeadProblem {
  at::Tensor q, k, v, d_out;  // [L, D], [S, D], [S, D], [L, D]
};
inline HeadProblem random_head(std::int64_t L, std::int64_t S, std::int64_t D,
                               at::ScalarType dtype) {
  return {random_tensor({L, D}, dtype, 1), random_tensor({S, D}, dtype, 2),
          random_tensor({S, D}, dtype, 3), random_tensor({L, D}, dtype, 4)};
}

struct HeadResults {
  at::Tensor out, d_q, d_k, d_v;
  std::vector<at::Tensor> all() const { return {out, d_q, d_k, d_v}; }
};

// A head with room for results, which it returns.
template <typename T>
HeadResults set_rows(AttentionHead<T>& head, const HeadProblem& in) {
  const auto rows = []<typename R>(const at::Tensor& x, R*) {
    return Rows<R>{reinterpret_cast<R*>(const_cast<void*>(x.const_data_ptr())), x.stride(0)};
  };
  const HeadResults results{at::zeros_like(in.q), at::zeros_like(in.q), at::zeros_like(in.k),
                            at::zeros_like(in.v)};
  const T* const read = nullptr;
  T* const write = nullptr;
  head.num_queries = static_cast<int>(in.q.size(0));
  head.num_keys = static_cast<int>(in.k.size(0));
  head.q = rows(in.q, read);
  head.k = rows(in.k, read);
  head.v = rows(in.v, read);
  head.d_out = rows(in.d_out, read);
  head.out = rows(results.out, write);
  head.d_q = rows(results.d_q, write);
  head.d_k = rows(results.d_k, write);
  head.d_v = rows(results.d_v, write);
  return results;
}

}  // namespace birkhoff::test
