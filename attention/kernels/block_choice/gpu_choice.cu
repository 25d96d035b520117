// The blocks that a query sees besides its own (block_choice.h). Legend: t query, n block of N, d
// of D, C blocks to choose, mean_n the mean key of block n.
//
//   s_tn = sum_d q_td mean_nd;  result_t = the C open blocks with the largest s_tn, best first
//
// where open blocks are whole, of the document of t, not its own, and, if causal, before it. Of
// equal products the earlier block wins; NaN is the largest.
//
// choose: a block of 256 threads owns 32 queries of a head and passes over the blocks of keys in
//   tiles of 32, if causal up to its last query's own. All threads multiply; then each lane of one
//   warp inserts the tile's products into the sorted list of its query. Only lists and one tile of
//   products exist, in shared memory: two tiles of vectors, the products and the lists, 4 KiB (D =
//   1) to 86 KiB (D = 256, C = 64).
//
// fp32. Blocks come in ascending order, and a query has one owner: no atomics, the same bits each
// time.
#include <math.h>

#include "attention/kernels/block_choice/gpu_params.h"
#include "attention/kernels/clusters/gpu_scores.cuh"

namespace birkhoff {
namespace {

// The best blocks of a query so far, the best first. Its numbers are kTile apart, so that the lists
// of a tile's queries, which lie side by side, use different banks.
struct BestBlocks {
  float* scores;
  int* blocks;
  int most, found;

  // `block` comes after all that were added before.
  __device__ void add(int block, float score) {
    int place = found;
    while (place > 0 && score > scores[(place - 1) * kTile]) --place;
    if (place == most) return;
    found = min(found + 1, most);
    for (int later = found - 1; later > place; --later) {
      scores[later * kTile] = scores[(later - 1) * kTile];
      blocks[later * kTile] = blocks[(later - 1) * kTile];
    }
    scores[place * kTile] = score;
    blocks[place * kTile] = block;
  }
};

// Shared memory: tiles of queries and of mean keys, their products, the lists.
std::size_t choice_bytes(int head_dim, int chosen) {
  return sizeof(float) * static_cast<std::size_t>(2 * ScoreTile::words(head_dim) + kTile * kTile +
                                                  2 * chosen * kTile);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) choose_kernel(const BlockChoiceParams p) {
  const int D = p.head_dim, lane = lane_number(), warp = warp_number();
  const OwnRows own(p.heads, p.queries);
  const ScoreTile q(0, D), means(1, D);
  float* const tile_products = ScoreTile(2, D).data;  // [mean key, query]
  float* const lists = tile_products + kTile * kTile;
  BestBlocks best{lists + lane, reinterpret_cast<int*>(lists + p.chosen * kTile) + lane, p.chosen,
                  0};
  const int query = own.first + lane, own_block = query / p.block;
  const std::int64_t sample = p.shared_documents ? 0 : own.head.b;
  const bool chooses = warp == 0 && lane < own.count;
  const std::int32_t document = chooses ? p.documents[sample * p.queries + query] : -1;
  const std::int32_t* const block_documents = p.block_documents + sample * p.blocks;
  const int end = p.causal ? min(p.blocks, (own.first + own.count - 1) / p.block) : p.blocks;
  q.load(row_of<const T>(p.q, own.head, own.first), p.q.strides[2], own.count, D);
  for (int first = 0; first < end; first += kTile) {
    __syncthreads();
    means.load(p.means + (own.number * p.blocks + first) * D, D, end - first, D);
    __syncthreads();
    float products[kPairs];
    multiply(q, means, D, products);
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      tile_products[(warp + n * kWarps) * kTile + lane] = products[n];
    }
    __syncthreads();
    if (document < 0) continue;
    for (int n = first; n < min(first + kTile, end); ++n) {
      const bool in_order = p.causal ? n < own_block : n != own_block;
      if (!in_order || block_documents[n] != document) continue;
      const float product = tile_products[(n - first) * kTile + lane];
      best.add(n, product != product ? INFINITY : product);
    }
  }
  if (!chooses) return;
  std::int32_t* const result = p.result + (own.number * p.queries + query) * p.chosen;
  for (int c = 0; c < p.chosen; ++c) result[c] = c < best.found ? best.blocks[c * kTile] : -1;
}

}  // namespace

void launch_block_choice(const BlockChoiceParams& params, cudaStream_t stream) {
  if (params.chosen == 0) return;
  with_row_type(params.dtype, [&]<typename T>() {
    launch_tiles(&choose_kernel<T>, std::int64_t{params.batch} * params.heads, params.queries,
                 choice_bytes(params.head_dim, params.chosen), stream, params);
  });
}

}  // namespace birkhoff
