// Grouped queries (Ainslie et al. 2023, "GQA"): fewer heads of keys than of queries. Of G query
// heads for each key head, query head h reads key head h / G.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/repeat_interleave.h>

#include <cstdint>
#include <vector>

namespace birkhoff {

// x [B, key heads or 1, ..] with a copy for each query head; a view where no copy is needed. May be
// undefined.
inline at::Tensor to_query_heads(const at::Tensor& x, std::int64_t query_heads) {
  if (!x.defined() || x.size(1) == query_heads) return x;
  if (x.size(1) > 1) return x.repeat_interleave(query_heads / x.size(1), 1);
  std::vector<std::int64_t> sizes = x.sizes().vec();
  sizes[1] = query_heads;
  return x.expand(sizes);
}

// The means of the groups of x [B, query heads, ..]: [B, key heads, ..]. Differentiable.
inline at::Tensor group_means(const at::Tensor& x, std::int64_t key_heads) {
  return x.size(1) == key_heads ? x : x.unflatten(1, {key_heads, -1}).mean(2);
}

}  // namespace birkhoff
