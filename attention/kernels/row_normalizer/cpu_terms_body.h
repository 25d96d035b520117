// The terms of distances in a head's scores (cpu_rows.h), compiled once for each instruction set.
#pragma once

#include "attention/kernels/row_normalizer/cpu_rows.h"
#include "attention/kernels/tile_attention/cpu_head_body.h"

namespace birkhoff {
namespace {

// s_t[j][i] += scale t_ij for queries and keys of a tile, whose rows lie `stride` apart.
template <typename T>
void add_terms(const RowHead<T>& head, Sum<T> scale, int first_query, int num_queries,
               int first_key, int num_keys, Sum<T>* s_t, int stride) {
  if (head.terms.data == nullptr) return;
  const Sum<T>* terms = head.terms.data + first_query * head.terms.stride + first_key;
  for (int i = 0; i < num_queries; ++i, terms += head.terms.stride) {
    for (int j = 0; j < num_keys; ++j) s_t[j * stride + i] += scale * terms[j];
  }
}

}  // namespace
}  // namespace birkhoff
