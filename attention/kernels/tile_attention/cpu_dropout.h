// Dropout of the tile kernels' probabilities. Included by files that are compiled with different
// flags from the rest: nothing here has external linkage.
#pragma once

#include "attention/kernels/common/cpu_products.h"
#include "attention/kernels/tile_attention/cpu_loop.h"
#include "cluster/base/random/philox_rounds.h"

namespace birkhoff {
namespace {

// Draws the keys that dropout keeps for each query: bit j % kBits of kept[j / kBits * kTile + i].
// Returns null without dropout: all are kept. `num_queries` is a multiple of eight: eight queries
// are drawn at once, one per lane, because consecutive keys of one query share the counters of
// Philox.
template <typename T>
const Bit<Sum<T>>* draw_kept(const TileShape& shape, const QueryTile<T>& queries, int num_queries,
                             const KeyTile<T>& keys, Bit<Sum<T>>* kept) {
  if (!shape.dropout) return nullptr;
  using U64x8 [[gnu::vector_size(64)]] = std::uint64_t;
  constexpr std::uint64_t kLow = 0xffffffff;
  constexpr int kN = 8, kWord = kBits<Sum<T>>;
  const TileDropout& dropout = *shape.dropout;
  const auto stride = static_cast<std::uint64_t>(dropout.query_stride);
  for (int i = 0; i < num_queries; i += kN) {
    const auto first = static_cast<std::uint64_t>(keys.first_element + i * dropout.query_stride);
    const U64x8 element = first + stride * U64x8{0, 1, 2, 3, 4, 5, 6, 7};
    const U64x8 misfit = element & 3;  // elements of the first counter that precede key 0
    const int end_key = keys.causal ? min_of(keys.num_keys, i + kN) : keys.num_keys;
    U64x8 bits{}, rest{};
    for (int c = 0; 4 * c < end_key + 3; ++c) {
      const U64x8 counter = (element >> 2) + static_cast<std::uint64_t>(c);
      U64x8 word0 = counter & kLow, word1 = counter >> 32;
      U64x8 word2 = U64x8{} + (queries.sample_id & kLow),
            word3 = U64x8{} + (queries.sample_id >> 32);
      philox_rounds(dropout.key, word0, word1, word2, word3);
      U64x8 four{};  // bits of four keys
      std::uint64_t bit = 1;
      for (const U64x8* word : {&word0, &word1, &word2, &word3}) {
        four |= (*word >> 8 >= dropout.least) & bit;
        bit <<= 1;
      }
      if (c < 16) {
        bits |= four << (4 * c);
      } else {
        rest = four;
      }
    }
    bits = bits >> misfit | rest << (63 - misfit) << 1;
    for (int lane = 0; lane < kN; ++lane) {
      for (int j = 0; j < kTile; j += kWord) {
        kept[j / kWord * kTile + i + lane] = static_cast<Bit<Sum<T>>>(bits[lane] >> j);
      }
    }
  }
  return kept;
}

// x where the query in each lane keeps key j, else 0. Null `kept`: x.
template <typename S>
inline Vector<S> keep(Vector<S> x, const Bit<S>* kept, int j, int i) {
  if (!kept) return x;
  const Bits<S> bits = load_bits<S>(kept + j / kBits<S> * kTile + i);
  return bits << (kBits<S> - 1 - j % kBits<S>) < 0 ? x : Vector<S>{};
}

}  // namespace
}  // namespace birkhoff
