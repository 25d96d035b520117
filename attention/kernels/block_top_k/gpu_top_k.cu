// The blocks that a query sees besides its own (block_top_k.h). Legend: t query, n block of N, d
// of D, C blocks to choose, mean_n the mean key of block n.
//
//   s_tn = sum_d q_td mean_nd;  result_t = the C open blocks with the largest s_tn, best first
//
// where open blocks are whole, of the document of t, not its own, and, if causal, before it. Among
// equal products the earlier block wins; NaN is the largest.
//
// choose: a block of 128 threads owns 64 queries of a head (32 if D and C are large) and passes
//   over the blocks of keys in tiles of 32, if causal up to its last query's own. Tensor cores
//   multiply (clusters/gpu_scores.cuh), nearly as exactly as in fp32; then a lane for each query
//   inserts the tile's products into its sorted list. Only lists and one tile of products exist,
//   in shared memory: a tile of vectors, the products and the lists, up to 80 KiB.
//
// Blocks come in ascending order, and a query has one owner: no atomics, the same bits each
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

// A block that would need more shared memory has fewer threads. An H100 has room for two of these.
constexpr int kFewThreads = 64;
constexpr std::size_t kMostBytes = 80 * 1024;
constexpr int kProductPitch = kWarpRows + 4;  // lanes write products to different banks

// Shared memory: a tile of mean keys, then each warp's products with it, then the lists.
std::size_t choice_bytes(int head_dim, int chosen, int threads) {
  return VectorTile::bytes(head_dim) +
         sizeof(float) * static_cast<std::size_t>(threads / kWarp * kVectors * kProductPitch +
                                                  2 * chosen * rows_of_block(threads));
}

template <typename T>
__global__ void __launch_bounds__(kScoreThreads, 3) choose_kernel(const BlockTopKParams p) {
  const int D = p.head_dim, warps = static_cast<int>(blockDim.x) / kWarp;
  const OwnRows own(p.heads, p.queries);
  const LaneRows<T> q(row_of<const T>(p.q, own.head, min(own.first, p.queries - 1)), p.q.strides[2],
                      own.count);
  const VectorTile means{D};
  float* const all_products =
      reinterpret_cast<float*>(score_memory) + VectorTile::bytes(D) / sizeof(float);
  float* const products = all_products + warp_number() * kVectors * kProductPitch;
  float* const lists = all_products + warps * kVectors * kProductPitch;
  // The query that this lane chooses for.
  const int local = lane_number() % kWarpRows, query = own.first + local,
            own_block = query / p.block, queries_of_block = warps * kWarpRows,
            of_block = warp_number() * kWarpRows + local;
  BestBlocks best{lists + of_block,
                  reinterpret_cast<int*>(lists + p.chosen * queries_of_block) + of_block, p.chosen,
                  queries_of_block, 0};
  const std::int64_t sample = p.shared_documents ? 0 : own.head.b;
  const bool chooses = lane_number() < own.count && lane_number() < kWarpRows;
  const std::int32_t document = chooses ? p.documents[sample * p.queries + query] : -1;
  const std::int32_t* const block_documents = p.block_documents + sample * p.blocks;
  const int end = p.causal ? min(p.blocks, (own.block_end - 1) / p.block) : p.blocks;
  for (int first = 0; first < end; first += kVectors) {
    const int count = min(kVectors, end - first);
    __syncthreads();
    means.load(p.means + (own.number * p.blocks + first) * D, count);
    __syncthreads();
    Products(q, means, [](int, const auto&) {}).for_each([&](int i, int v, float product) {
      products[v * kProductPitch + q.number(i)] = product;
    });
    __syncwarp();
    if (document < 0) continue;
    for (int n = first; n < first + count; ++n) {
      const bool in_order = p.causal ? n < own_block : n != own_block;
      if (!in_order || block_documents[n] != document) continue;
      const float product = products[(n - first) * kProductPitch + local];
      best.add(n, product != product ? INFINITY : product);
    }
  }
  if (!chooses) return;
  std::int32_t* const result = p.result + (own.number * p.queries + query) * p.chosen;
  for (int c = 0; c < p.chosen; ++c) {
    result[c] = c < best.found ? best.blocks[c * queries_of_block] : -1;
  }
}

}  // namespace

void launch_block_choice(const BlockTopKParams& params, cudaStream_t stream) {
  if (params.chosen == 0) return;
  const std::size_t bytes = choice_bytes(params.head_dim, params.chosen, kScoreThreads);
  const int threads = bytes <= kMostBytes ? kScoreThreads : kFewThreads;
  with_element_type(params.dtype, [&]<typename T>() {
    launch_tiles(&choose_kernel<T>, std::int64_t{params.batch} * params.heads, params.queries,
                 threads, choice_bytes(params.head_dim, params.chosen, threads), stream, params);
  });
}

}  // namespace birkhoff
