// Attention of one head whose weights are those of top-k or entmax (row_normalizer.h). Works on raw
// pointers, without LibTorch; row_attention.cpp calls it.
//
// Query i sees the keys [first_i, end_i). Scores are S_ij = (q_i . k_j + t_ij) scale, in the type
// of sums, with the terms t of distances. Their gradients are d_S_ij scale.
// With G_ij = c_ij d_out_i . v_j, c_ij being dropout's factor:
//   top-k:   d_S_ij = p_ij (G_ij - sum_n p_in G_in) for the kept keys;
//   entmax:  p = max((a - 1) S - t, 0)^(1 / (a - 1)),  r = p^(2 - a) where p > 0,
//            d_S_ij = r_ij (G_ij - sum_n r_in G_in / sum_n r_in).
// A query that sees no key has output 0.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/kernels/tile_attention/cpu_head.h"
#include "cluster/base/instruction_set.h"

namespace birkhoff {

constexpr int kMaxKeptKeys = 64;  // of the top-k kernel

struct TopKShape : HeadShape {
  int kept = 0;  // maximum number of keys that a query keeps, at most kMaxKeptKeys
};

// What both kinds of kernels read: the keys that each query sees, and the terms of distances.
template <typename T>
struct RowHead : AttentionHead<T> {
  const std::int32_t *first = nullptr, *end = nullptr;  // [L]
  // t_ij at row i, column j, for keys that the query sees; null: 0. d_terms holds zeros before
  // backward, which writes the gradients of keys with a weight.
  Rows<const Sum<T>> terms;
  Rows<Sum<T>> d_terms;
};

template <typename T>
struct TopKHead : RowHead<T> {
  const std::int32_t* kept = nullptr;  // [L]
  // The kept keys of each query, the largest score first, and their weights; -1 and 0 after the
  // last. [L, kept]: written by forward, read by backward.
  std::int32_t* index = nullptr;
  Sum<T>* weight = nullptr;
};

template <typename T>
struct EntmaxHead : RowHead<T> {
  Sum<T> alpha = 2;             // the exponent a, in (1, 2]
  Sum<T>* threshold = nullptr;  // t [L]: written by forward, read by backward
  double* d_alpha = nullptr;    // backward adds to it; null: not wanted
};

// `scratch` has scratch_bytes(), aligned to 64, uninitialized; that of entmax grows with the number
// of keys. Equal arguments give equal bits. Writes the rows that exist.
template <typename T>
struct RowKernels {
  std::size_t (*top_k_scratch_bytes)(const TopKShape& shape);
  void (*top_k_forward)(const TopKShape& shape, const TopKHead<T>& head, void* scratch);
  void (*top_k_backward)(const TopKShape& shape, const TopKHead<T>& head, void* scratch);
  std::size_t (*entmax_scratch_bytes)(const HeadShape& shape);
  void (*entmax_forward)(const HeadShape& shape, const EntmaxHead<T>& head, void* scratch);
  void (*entmax_backward)(const HeadShape& shape, const EntmaxHead<T>& head, void* scratch);
};

// For T = float, double and Bf16, which is computed in float.
template <typename T>
const RowKernels<T>& row_kernels(InstructionSet set);

// Defined in cpu_rows.simd.cpp, compiled for kSet.
template <InstructionSet kSet, typename T>
const RowKernels<T>& compiled_row_kernels();

}  // namespace birkhoff
