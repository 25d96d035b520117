// Attention over a list of keys for each query, with known weights (TopKParams). Legend: i query, n
// element of its list, j(i, n) the key there, d of D.
//
//   out_id = sum_n w_in v_j(i,n)d
//
// Backward: G_in = sum_d d_out_id v_j(i,n)d,  ds_in = w_in (G_in - sum_m w_im G_im),
//
//   d_q_id = scale sum_n ds_in k_j(i,n)d,  d_t_ij(i,n) = scale ds_in for terms t of distances,
//   d_k_jd = scale sum ds_in q_id,  d_v_jd = sum w_in d_out_id  over i, n with j(i, n) = j
//
// listed_values, query_gradients: eight threads own a query and read the rows of its list one after
//   another, mostly from the L2 cache: k rows of D 16-bit elements for each query.
// key_gradients: a warp owns a key and reads the rows of the queries that list it. Each of its four
//   teams of eight threads takes every fourth of them, and their sums are added at the end.
//
// fp32 but for the rows. Each element has one owner, which adds in a fixed order: the same bits
// each time.
#include "attention/kernels/common/gpu_row_team.cuh"
#include "attention/kernels/row_normalizer/gpu_params.h"

namespace birkhoff {
namespace {

// The query that a team owns.
struct ListOwner : TeamNumber {
  GpuHead head;
  int query;
  std::int64_t list;  // index of the first element

  __device__ explicit ListOwner(const TopKParams& p)
      : TeamNumber(static_cast<unsigned>(p.batch * p.heads) * static_cast<unsigned>(p.queries)) {
    const int of_all = number / p.queries;
    query = number - of_all * p.queries;
    head = {of_all / p.heads, of_all % p.heads};
    list = std::int64_t{number} * p.most;
  }
};

// sums += weight times a run of a row.
template <typename T>
__device__ inline void add_run(float (&sums)[kTeamColumns], float weight, const T* row, int first,
                               int head_dim) {
  float x[kTeamColumns];
  load_run(row, first, head_dim, x);
#pragma unroll
  for (int c = 0; c < kTeamColumns; ++c) sums[c] += weight * x[c];
}

// The team's row of `to` = factor sum_n weights_n x_j(n).
template <typename T>
__device__ inline void store_sum(const TopKParams& p, const ListOwner& own, const float* weights,
                                 const RowsParams& x, float factor, const RowsParams& to) {
  visit_runs(own.member, p.head_dim, [&](int first) {
    float sums[kTeamColumns] = {};
#pragma unroll 4
    for (int n = 0; n < p.most; ++n) {
      const int key = p.index[own.list + n];
      if (key < 0) continue;
      add_run(sums, weights[own.list + n], row_of<const T>(x, own.head, key), first, p.head_dim);
    }
#pragma unroll
    for (int c = 0; c < kTeamColumns; ++c) sums[c] *= factor;
    store_run(row_of<T>(to, own.head, own.query), first, p.head_dim, sums);
  });
}

template <typename T>
__global__ void __launch_bounds__(kTeamThreads, 4) listed_values_kernel(const TopKParams p) {
  const ListOwner own(p);
  if (own.exists) store_sum<T>(p, own, p.weight, p.v, 1, p.out);
}

template <typename T>
__global__ void __launch_bounds__(kTeamThreads, 3) query_gradients_kernel(const TopKParams p) {
  const ListOwner own(p);
  const T* const d_out = row_of<const T>(p.d_out, own.head, own.query);
  float* const d_score = p.d_score + own.list;
  // G and its weighted sum. A member keeps every eighth G.
  float delta = 0;
#pragma unroll 2
  for (int n = 0; n < p.most; ++n) {
    const int key = p.index[own.list + n];
    float product = 0;
    if (key >= 0) {
      visit_runs(own.member, p.head_dim, [&](int first) {
        float x[kTeamColumns], y[kTeamColumns];
        load_run(d_out, first, p.head_dim, x);
        load_run(row_of<const T>(p.v, own.head, key), first, p.head_dim, y);
#pragma unroll
        for (int c = 0; c < kTeamColumns; ++c) product += x[c] * y[c];
      });
    }
    product = lane_sum<kRowTeam>(product);
    delta += p.weight[own.list + n] * product;
    if (own.exists && n % kRowTeam == own.member) d_score[n] = product;
  }
  if (own.exists) {
    for (int n = own.member; n < p.most; n += kRowTeam) {
      d_score[n] = p.weight[own.list + n] * (d_score[n] - delta);
      const int key = p.index[own.list + n];
      if (p.d_terms != nullptr && key >= 0) {
        p.d_terms[p.term_of(own.head, own.query, key)] = p.scale * d_score[n];
      }
    }
  }
  __syncwarp();
  if (own.exists) store_sum<T>(p, own, p.d_score, p.k, p.scale, p.d_q);
}

template <typename T>
__global__ void __launch_bounds__(kTeamThreads, 2) key_gradients_kernel(const TopKParams p) {
  constexpr int kTeams = kWarp / kRowTeam;
  const unsigned number =
                     blockIdx.x * (kTeamThreads / kWarp) + static_cast<unsigned>(warp_number()),
                 keys = static_cast<unsigned>(p.keys), of_all = number / keys;
  if (of_all >= static_cast<unsigned>(p.batch * p.heads)) return;
  const int key = static_cast<int>(number - of_all * keys), team = lane_number() / kRowTeam;
  const GpuHead head{static_cast<int>(of_all) / p.heads, static_cast<int>(of_all) % p.heads};
  const std::int64_t slots = std::int64_t{of_all} * p.queries * p.most;
  const std::int32_t* const starts = p.starts + std::int64_t{of_all} * (p.keys + 1) + key;
  const int begin = starts[0], end = starts[1];
  // All lanes, also those without columns, for the sums over teams.
  for (int column = 0; column < p.head_dim; column += kRowTeam * kTeamColumns) {
    const int first = column + lane_number() % kRowTeam * kTeamColumns;
    float d_k[kTeamColumns] = {}, d_v[kTeamColumns] = {};
#pragma unroll 2
    for (int n = begin + team; n < end; n += kTeams) {
      const int slot = p.order[slots + n], query = slot / p.most;
      add_run(d_k, p.d_score[slots + slot], row_of<const T>(p.q, head, query), first, p.head_dim);
      add_run(d_v, p.weight[slots + slot], row_of<const T>(p.d_out, head, query), first,
              p.head_dim);
    }
#pragma unroll
    for (int c = 0; c < kTeamColumns; ++c) {
#pragma unroll
      for (int distance = kRowTeam; distance < kWarp; distance *= 2) {
        d_k[c] += __shfl_xor_sync(kWholeWarp, d_k[c], distance);
        d_v[c] += __shfl_xor_sync(kWholeWarp, d_v[c], distance);
      }
      d_k[c] *= p.scale;
    }
    if (team != 0) continue;
    store_run(row_of<T>(p.d_k, head, key), first, p.head_dim, d_k);
    store_run(row_of<T>(p.d_v, head, key), first, p.head_dim, d_v);
  }
}

// `threads` for each of `rows` rows of all heads.
void launch_rows(void (*kernel)(TopKParams), const TopKParams& p, int rows, int threads,
                 cudaStream_t stream) {
  const std::int64_t all = std::int64_t{p.batch} * p.heads * rows,
                     of_block = kTeamThreads / threads;
  launch({.blocks = (all + of_block - 1) / of_block, .threads = kTeamThreads, .stream = stream},
         kernel, p);
}

}  // namespace

void launch_listed_values(const TopKParams& params, cudaStream_t stream) {
  with_16_bit_type(params.dtype, [&]<typename T>() {
    launch_rows(&listed_values_kernel<T>, params, params.queries, kRowTeam, stream);
  });
}

void launch_listed_gradients(const TopKParams& params, cudaStream_t stream) {
  with_16_bit_type(params.dtype, [&]<typename T>() {
    launch_rows(&query_gradients_kernel<T>, params, params.queries, kRowTeam, stream);
    launch_rows(&key_gradients_kernel<T>, params, params.keys, kWarp, stream);
  });
}

}  // namespace birkhoff
