// Shared code of programs for attention whose queries may see any keys: the tensors, and slow
// kernels that keep the weights of all pairs of a query and a key in memory.
#pragma once

#include <cmath>

#include "attention/kernels/common/gpu_rows.h"
#include "tests/bench/kernel_lab/lab.h"

namespace birkhoff::lab {

// Tensors are [batch, heads, queries or keys, head_dim], with head_dim up to 128. Rows are
// numbered over all heads.
struct AttentionSize {
  int batch, heads, queries, keys, head_dim;

  std::int64_t all_heads() const { return std::int64_t{batch} * heads; }
  std::int64_t all_queries() const { return all_heads() * queries; }
  std::int64_t all_keys() const { return all_heads() * keys; }
  std::int64_t query_bytes() const { return 2 * all_queries() * head_dim; }
  std::int64_t key_bytes() const { return 2 * all_keys() * head_dim; }
  float scale() const { return 1 / std::sqrt(static_cast<float>(head_dim)); }
  std::string text() const {
    return "L " + std::to_string(queries) + ", D " + std::to_string(head_dim) +
           (keys != queries ? ", S " + std::to_string(keys) : "");
  }
};

// Random inputs, and results.
struct AttentionTensors {
  AttentionTensors(const AttentionSize& s, std::uint64_t seed)
      : size(s),
        q(s.all_queries() * s.head_dim),
        k(s.all_keys() * s.head_dim),
        v(k.size()),
        out(q.size()),
        d_out(q.size()),
        d_q(q.size()),
        d_k(k.size()),
        d_v(k.size()) {
    q.fill_random(seed + 1);
    k.fill_random(seed + 2);
    v.fill_random(seed + 3);
    d_out.fill_random(seed + 4);
  }

  // x as kernels take it, one of these tensors.
  RowsParams rows(const Half& x) const {
    const std::int64_t head = x.size() / size.all_heads();
    return {x.get(), {size.heads * head, head, size.head_dim}};
  }
  // Sets the members of kernels' parameters that are rows of these tensors.
  template <typename Params>
  void set_rows(Params& params) const {
    params.q = rows(q);
    params.k = rows(k);
    params.v = rows(v);
    params.out = rows(out);
    params.d_out = rows(d_out);
    params.d_q = rows(d_q);
    params.d_k = rows(d_k);
    params.d_v = rows(d_v);
  }

  AttentionSize size;
  Half q, k, v, out, d_out, d_q, d_k, d_v;
};

// What slow kernels read and write. The weights p of pairs and the gradients of their scores are
// [B, H, S, L], so that threads that own neighboring queries read neighboring numbers: 0 where a
// query does not see a key.
struct AllPairs {
  AllPairs(const AttentionTensors& t, const Float& weights, const Float& score_gradients)
      : heads(t.size.heads),
        queries(t.size.queries),
        keys(t.size.keys),
        head_dim(t.size.head_dim),
        scale(t.size.scale()),
        q(t.q.get()),
        k(t.k.get()),
        v(t.v.get()),
        d_out(t.d_out.get()),
        p(weights.get()),
        d_s(score_gradients.get()) {
    weights.zero();
    score_gradients.zero();
  }
  // The number of elements of p, and of d_s.
  static std::int64_t count(const AttentionSize& s) { return s.all_queries() * s.keys; }

  // Of the query with this number over all heads and a key of its head.
  __device__ std::int64_t place(std::int64_t query, int key) const {
    return key_number(query, key) * queries + query % queries;
  }
  __device__ double product(std::int64_t query, int key) const {
    return dot(q + query * head_dim, k + key_number(query, key) * head_dim, head_dim);
  }
  // The gradient of p, if nothing but the output depends on it.
  __device__ double gradient(std::int64_t query, int key) const {
    return dot(d_out + query * head_dim, v + key_number(query, key) * head_dim, head_dim);
  }
  __device__ std::int64_t key_number(std::int64_t query, int key) const {
    return query / queries * keys + key;
  }

  int heads, queries, keys, head_dim;
  float scale;
  __nv_bfloat16* q;
  const __nv_bfloat16 *k, *v, *d_out;
  float *p, *d_s;
};

// Results of one precision.
template <typename T>
struct AttentionResults {
  explicit AttentionResults(const AttentionTensors& t)
      : out(t.q.size()), d_q(t.q.size()), d_k(t.k.size()), d_v(t.k.size()) {}
  Array<T> out, d_q, d_k, d_v;
};

// Results from p and d_s. kRounded: with the roundings of 16-bit products.
template <bool kRounded, typename T>
void solve_products(const AttentionSize& s, const AllPairs& pairs,
                    const AttentionResults<T>& results) {
  T *out = results.out.get(), *d_q = results.d_q.get(), *d_k = results.d_k.get(),
    *d_v = results.d_v.get();
  for_each(s.all_queries(), [=] __device__(std::int64_t query) {
    float of_v[128] = {}, of_k[128] = {};
    for (int key = 0; key < pairs.keys; ++key) {
      const std::int64_t row = pairs.key_number(query, key) * pairs.head_dim;
      const float p = rounded<kRounded>(pairs.p[pairs.place(query, key)]),
                  d_s = rounded<kRounded>(pairs.d_s[pairs.place(query, key)]);
      if (p == 0 && d_s == 0) continue;
      for (int d = 0; d < pairs.head_dim; ++d) {
        of_v[d] += p * to_float(pairs.v[row + d]);
        of_k[d] += d_s * to_float(pairs.k[row + d]);
      }
    }
    for (int d = 0; d < pairs.head_dim; ++d) {
      out[query * pairs.head_dim + d] = from_float<T>(of_v[d]);
      d_q[query * pairs.head_dim + d] = from_float<T>(pairs.scale * of_k[d]);
    }
  });
  for_each(s.all_keys(), [=] __device__(std::int64_t number) {
    const std::int64_t first = number / pairs.keys * pairs.queries;  // query of the head
    float of_d_out[128] = {}, of_q[128] = {};
    for (std::int64_t query = first; query < first + pairs.queries; ++query) {
      const std::int64_t place = pairs.place(query, static_cast<int>(number % pairs.keys)),
                         row = query * pairs.head_dim;
      const float p = rounded<kRounded>(pairs.p[place]), d_s = rounded<kRounded>(pairs.d_s[place]);
      if (p == 0 && d_s == 0) continue;
      for (int d = 0; d < pairs.head_dim; ++d) {
        of_d_out[d] += p * to_float(pairs.d_out[row + d]);
        of_q[d] += d_s * to_float(pairs.q[row + d]);
      }
    }
    for (int d = 0; d < pairs.head_dim; ++d) {
      d_k[number * pairs.head_dim + d] = from_float<T>(pairs.scale * of_q[d]);
      d_v[number * pairs.head_dim + d] = from_float<T>(of_d_out[d]);
    }
  });
}

// The checks of a backward pass.
inline std::vector<Output> gradient_outputs(const AttentionTensors& t,
                                            const AttentionResults<float>& exact,
                                            const AttentionResults<__nv_bfloat16>& rounded) {
  return {output("d_q", t.d_q, exact.d_q, rounded.d_q),
          output("d_k", t.d_k, exact.d_k, rounded.d_k),
          output("d_v", t.d_v, exact.d_v, rounded.d_v)};
}

}  // namespace birkhoff::lab
