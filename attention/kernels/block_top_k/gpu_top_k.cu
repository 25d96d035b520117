// The blocks that a query sees besides its own (block_top_k.h). Legend: t query, n block of N, d
// of D, C blocks to choose, mean_n the mean key of block n.
//
//   s_tn = sum_d q_td mean_nd;  result_t = the C open blocks with the largest s_tn, best first
//
// where open blocks are whole, of the document of t, not its own, and, if causal, before it. Among
// equal products the earlier block wins; NaN is the largest.
//
// choose: a block of 256 threads owns 128 queries of a head (32 if D or C are large) and passes
//   over the blocks of keys in tiles of 32, if causal up to its last query's own. All threads
//   multiply; then one thread for each query inserts the tile's products into its sorted list. Only
//   lists and one tile of products exist, in shared memory: two tiles of vectors, the products and
//   the lists, up to 85 KiB.
//
// fp32. Blocks come in ascending order, and a query has one owner: no atomics, the same bits each
// time.
#include <math.h>

#include "attention/kernels/block_top_k/gpu_params.h"
#include "attention/kernels/clusters/gpu_scores.cuh"

namespace birkhoff {
namespace {

// The best blocks of a query so far, the best first. Its elements have the stride `apart`, so that
// the lists of a tile's queries, which lie side by side, use different banks.
struct BestBlocks {
  float* scores;
  int* blocks;
  int most, apart, found;  // most > 0
  float last = 0;          // the smallest of the scores

  // `block` comes after all blocks added before.
  __device__ void add(int block, float score) {
    if (found == most && !(score > last)) return;
    int place = found;
    while (place > 0 && score > scores[(place - 1) * apart]) --place;
    found = min(found + 1, most);
    for (int later = found - 1; later > place; --later) {
      scores[later * apart] = scores[(later - 1) * apart];
      blocks[later * apart] = blocks[(later - 1) * apart];
    }
    scores[place * apart] = score;
    blocks[place * apart] = block;
    last = scores[(found - 1) * apart];
  }
};

// Shared memory: tiles of queries and of mean keys, their products, the lists.
std::size_t choice_bytes(int head_dim, int chosen, int rows) {
  const int count = rows * kWarp, pitch = ScoreTile<kVectors>::pitch_for(head_dim);
  return sizeof(float) * static_cast<std::size_t>((count + kVectors) * pitch + kVectors * count +
                                                  2 * chosen * count);
}

template <typename T, int kRows>
__global__ void __launch_bounds__(kThreads, kRows == kManyRows ? 2 : 4)
    choose_kernel(const BlockTopKParams p) {
  using Own = OwnRows<kRows>;
  constexpr int kQueries = Own::kCount;
  const int D = p.head_dim, lane = lane_number(), warp = warp_number();
  const Own own(p.heads, p.queries);
  const ScoreTile<kQueries> q(0, D);
  const ScoreTile<kVectors> means(q.words(D), D);
  float* const tile_products = means.row(kVectors);  // [mean key, query]
  float* const lists = tile_products + kVectors * kQueries;
  // The query that this thread chooses for.
  const int local = static_cast<int>(threadIdx.x) % kQueries, query = own.first + local,
            own_block = query / p.block;
  BestBlocks best{lists + local, reinterpret_cast<int*>(lists + p.chosen * kQueries) + local,
                  p.chosen, kQueries, 0};
  const std::int64_t sample = p.shared_documents ? 0 : own.head.b;
  const bool chooses = static_cast<int>(threadIdx.x) < own.count;
  const std::int32_t document = chooses ? p.documents[sample * p.queries + query] : -1;
  const std::int32_t* const block_documents = p.block_documents + sample * p.blocks;
  const int end = p.causal ? min(p.blocks, (own.first + own.count - 1) / p.block) : p.blocks;
  q.load(row_of<const T>(p.q, own.head, own.first), p.q.strides[2], own.count, D);
  for (int first = 0; first < end; first += kVectors) {
    const int count = min(kVectors, end - first);
    __syncthreads();
    means.load(p.means + (own.number * p.blocks + first) * D, D, count, D);
    __syncthreads();
    float products[kRows][kPairs];
    multiply<kRows>(q, means, count, D, products);
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        tile_products[(warp + n * kWarps) * kQueries + lane + i * kWarp] = products[i][n];
      }
    }
    __syncthreads();
    if (document < 0) continue;
    for (int n = first; n < first + count; ++n) {
      const bool in_order = p.causal ? n < own_block : n != own_block;
      if (!in_order || block_documents[n] != document) continue;
      const float product = tile_products[(n - first) * kQueries + local];
      best.add(n, product != product ? INFINITY : product);
    }
  }
  if (!chooses) return;
  std::int32_t* const result = p.result + (own.number * p.queries + query) * p.chosen;
  for (int c = 0; c < p.chosen; ++c) result[c] = c < best.found ? best.blocks[c * kQueries] : -1;
}

}  // namespace

void launch_block_choice(const BlockTopKParams& params, cudaStream_t stream) {
  if (params.chosen == 0) return;
  with_element_type(params.dtype, [&]<typename T>() {
    const auto bytes_for = [&](int rows) {
      return choice_bytes(params.head_dim, params.chosen, rows);
    };
    const auto with_rows = [&]<int kRows>() {
      launch_tiles<kRows>(&choose_kernel<T, kRows>, std::int64_t{params.batch} * params.heads,
                          params.queries, bytes_for(kRows), stream, params);
    };
    if (has_room_for_many(bytes_for)) return with_rows.template operator()<kManyRows>();
    with_rows.template operator()<kFewRows>();
  });
}

}  // namespace birkhoff
