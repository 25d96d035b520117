// The common part of the block-attention kernels, on the tiles of tile_attention/gpu_body.h: the
// rows that a thread loads and stores, and the pairs that it sees. gpu_forward.h and gpu_backward.h
// describe what the kernels compute and own.
#pragma once

#include <cstdint>

#include "attention/kernels/block_attention/gpu_params.h"
#include "attention/kernels/tile_attention/gpu_body.h"
#include "cluster/base/gpu/kernel_source.h"

namespace birkhoff {

// A block of one head.
struct BlockPlace {
  int batch, head, n;

  BIRKHOFF_DEVICE std::int64_t of(const std::int64_t* strides) const {
    return batch * strides[0] + head * strides[1] + n * strides[2];
  }
};

// A tile of queries and a tile of keys.
struct TilePair {
  int num_queries, num_keys;
  bool hidden;       // no query sees a key
  bool diagonal;     // query i sees keys j <= i
  const bool* mask;  // of query 0 and key 0; null: all
  std::int64_t mask_query_stride, mask_key_stride;
  bool has_bias;
  const float* distances;  // query 0's in DistanceParams::scores; null: the keys have none
  int first_row;           // of the table, for query 0 and key 0, before clipping
  std::int64_t element;    // of the noise of query 0 and key 0
};

// A thread block works on a tile of queries or of keys, or, if kTiles is 2, on both tiles of
// queries of a block of at most 128. Each tile has its own warps.
template <typename Thread, int kHeadDim, int kTiles>
class BlockAttentionBody : protected TileBody<Thread, kHeadDim> {
  using Tile = TileBody<Thread, kHeadDim>;
  using Shape = GpuTileShape<kHeadDim>;

 public:
  static constexpr int kThreads = kTiles * Shape::kThreads;

  BIRKHOFF_DEVICE BlockAttentionBody(const Thread& thread, const BlockAttentionParams& p)
      : TileBody<Thread, kHeadDim>(
            thread, thread.index() / 32 / (kTileRows / 16) % GpuTileShape<kHeadDim>::kWarpsOfRow),
        p_(p),
        tile_(thread.index() / Shape::kThreads % kTiles) {}

 protected:
  using Tile::first_column_;
  using Tile::first_row_;
  using Tile::lane_;
  using Tile::thread_;
  using typename Tile::Columns;

  static constexpr int kRows = kTiles * kTileRows;  // of a thread block

  const BlockAttentionParams& p_;
  const int tile_;  // the one of the kTiles tiles that this thread works on
  SampleNoise noise_;

  // ---- Work distribution: thread blocks are numbered by head, then tile, block, and batch.

  // The number of thread blocks for queries, or for one source's keys, which have `heads` heads.
  BIRKHOFF_HOST_DEVICE static std::int64_t num_parts(const BlockAttentionParams& p, int heads) {
    return std::int64_t{p.batch} * heads * p.blocks * parts_of_block(p);
  }
  BIRKHOFF_HOST_DEVICE static int parts_of_block(const BlockAttentionParams& p) {
    return kTiles == 1 ? (p.block + kTileRows - 1) / kTileRows : 1;
  }
  // Sets `first` to the first row, in its block, of this thread's tile. Uses 32 bits: a grid has
  // fewer than 2^31 thread blocks, and 64-bit divisions would take longer than the first loads.
  BIRKHOFF_DEVICE BlockPlace place_of(unsigned part, int heads, int& first) const {
    const auto next = [&](int count) {
      const unsigned divisor = static_cast<unsigned>(count), quotient = part / divisor;
      const unsigned remainder = part - quotient * divisor;
      part = quotient;
      return static_cast<int>(remainder);
    };
    BlockPlace place;
    place.head = next(heads);
    first = (kTiles == 1 ? next(parts_of_block(p_)) : tile_) * kTileRows;
    place.n = next(p_.blocks);
    place.batch = static_cast<int>(part);
    return place;
  }
  // The tiles of keys that the thread block's queries see.
  BIRKHOFF_DEVICE KeyTiles<KeySourceParams> keys_of(const BlockPlace& place,
                                                    int first_query) const {
    const int last_tile = kTiles == 1 ? first_query : (kTiles - 1) * kTileRows;
    return {p_.sources, p_.num_sources, p_.blocks, p_.block, place.n, last_tile};
  }

  // The block of keys that belongs to a block of queries.
  BIRKHOFF_DEVICE BlockPlace key_place(BlockPlace place) const {
    place.head /= p_.group;
    return place;
  }

  BIRKHOFF_DEVICE int index_in_tile() const { return thread_.index() % Shape::kThreads; }
  BIRKHOFF_DEVICE int rows_from(int first) const {
    return p_.block - first < kTileRows ? p_.block - first : kTileRows;
  }
  // Index of row `first` of a block in [batch, heads, blocks, block], for values per query or per
  // key.
  BIRKHOFF_DEVICE std::int64_t number_of(const BlockPlace& place, int heads, int first) const {
    return ((static_cast<std::int64_t>(place.batch) * heads + place.head) * p_.blocks + place.n) *
               p_.block +
           first;
  }
  BIRKHOFF_DEVICE std::int64_t query_number(const BlockPlace& place, int first) const {
    return number_of(place, p_.heads, first);
  }
  BIRKHOFF_DEVICE std::int64_t key_number(const BlockPlace& place, int first) const {
    return number_of(place, p_.key_heads(), first);
  }

  // `place` is the queries' block.
  BIRKHOFF_DEVICE TilePair pair_of(const BlockPlace& place, int first_query, int source_index,
                                   int offset, int first_key) const {
    const KeySourceParams& source = p_.sources[source_index];
    const int mask_index = source.first_mask + offset - source.window.first_offset;
    const BlockMaskParams& mask = p_.masks[mask_index];
    TilePair pair{};
    pair.num_queries = rows_from(first_query);
    pair.num_keys = rows_from(first_key);
    const bool ordered = source.window.causal && offset == 0;
    pair.hidden = kTiles > 1 && ordered && first_key > first_query;
    pair.diagonal = ordered && first_key == first_query;
    pair.mask_query_stride = mask.strides[3];
    pair.mask_key_stride = mask.strides[4];
    if (mask.data != nullptr) {
      pair.mask = mask.data + key_place(place).of(mask.strides) + first_query * mask.strides[3] +
                  first_key * mask.strides[4];
      // A mask with one entry for the whole block, as in Sinkhorn attention, costs one read.
      if (mask.strides[3] == 0 && mask.strides[4] == 0 && *pair.mask) pair.mask = nullptr;
    }
    pair.has_bias = source.bias.data != nullptr;
    if (p_.distances.scores != nullptr && source.in_place) {
      pair.distances = p_.distances.scores + query_number(place, first_query) * p_.distances.rows;
      pair.first_row = offset * p_.block + first_key - first_query - p_.distances.least;
    }
    pair.element = query_number({0, place.head, place.n}, first_query) * p_.dropout.columns +
                   p_.dropout.first_column + mask_index * p_.block + first_key;
    return pair;
  }

  BIRKHOFF_DEVICE TilePair pair_of(const BlockPlace& place, int first_query,
                                   const KeyTiles<KeySourceParams>& keys) const {
    return pair_of(place, first_query, keys.source(), keys.offset(), keys.first_key());
  }

  BIRKHOFF_DEVICE void find_noise(int batch) { noise_ = SampleNoise(p_.dropout, batch); }

  // ---- Rows between global and shared memory, 16 bytes at a time.

  static BIRKHOFF_DEVICE const std::uint16_t* first_of(const BlockRowsParams& rows,
                                                       const BlockPlace& place, int first) {
    return rows.data + place.of(rows.strides) + first * rows.strides[3];
  }

  // Called by all threads of a tile; the rows have arrived after wait() and a barrier.
  BIRKHOFF_DEVICE void load_rows(std::uint32_t tile, const BlockRowsParams& rows,
                                 const BlockPlace& place, int first) const {
    constexpr int kGroups = kHeadDim / 8, kRowsAtOnce = Shape::kThreads / kGroups;
    const int index = index_in_tile(), row = index / kGroups, column = index % kGroups * 8;
    const int count = column < p_.head_dim ? rows_from(first) : 0;
    const std::uint16_t* from = first_of(rows, place, first) + row * rows.strides[3] + column;
    const std::uint32_t to = tile + place_in_tile<kHeadDim>(row, column);
    static_assert(kRowsAtOnce % 8 == 0);
    BIRKHOFF_UNROLL_BY(4)
    for (int i = 0; i < kTileRows; i += kRowsAtOnce) {
      thread_.template copy_async<16>(to + 2 * i * kHeadDim, from, i + row < count);
      from += kRowsAtOnce * rows.strides[3];
    }
  }

  // Likewise, one value per row of queries, [batch, heads, blocks, block]; 0 for rows that do not
  // exist.
  BIRKHOFF_DEVICE void load_numbers(std::uint32_t to, const float* numbers, const BlockPlace& place,
                                    int first) const {
    const int row = index_in_tile();
    if (row >= kTileRows) return;
    const bool exists = row < rows_from(first);
    thread_.template copy_async<4>(
        to + 4 * row, numbers + (exists ? query_number(place, first) + row : 0), exists);
  }

  // Loads tiles of k and v; `place` is the queries' block. Called by all threads of a thread block:
  // with two tiles of queries, the first tile's threads load k and the second tile's load v.
  BIRKHOFF_DEVICE void load_key_rows(std::uint32_t k_tile, std::uint32_t v_tile,
                                     const KeyTiles<KeySourceParams>& keys,
                                     BlockPlace place) const {
    const KeySourceParams& source = p_.sources[keys.source()];
    place = key_place(place);
    place.n += keys.offset();
    if (tile_ == 0) load_rows(k_tile, source.k, place, keys.first_key());
    if (tile_ == kTiles - 1) load_rows(v_tile, source.v, place, keys.first_key());
  }

  // Called by all threads. Stores the bias of a tile of keys, times log2(e); it is visible after a
  // barrier. Sources with a bias have only offset 0: `place` is the block of the keys and of the
  // queries.
  BIRKHOFF_DEVICE void load_bias(std::uint32_t to, const KeyBiasParams& bias,
                                 const BlockPlace& place, int first) const {
    const int row = thread_.index();
    if (bias.data == nullptr || row >= kTileRows) return;
    const std::uint16_t* from =
        bias.data + place.of(bias.strides) + (first + row) * bias.strides[3];
    thread_.store_shared(to + 4 * row,
                         row < rows_from(first) ? kLog2E * thread_.unpack(*from) : 0.0f);
  }

  // Stores factor * c to the warp's rows and columns. They pass through `tile`, where no other warp
  // uses them.
  BIRKHOFF_DEVICE void store_rows(const Columns& c, float factor, std::uint32_t tile,
                                  const BlockRowsParams& rows, const BlockPlace& place,
                                  int first) const {
    constexpr int kGroups = Shape::kWarpColumns / 8;
    const Place place_in = place_in_c(lane_, 0);
    const std::uint32_t to =
        tile + place_in_tile<kHeadDim>(first_row_ + place_in.row, first_column_ + place_in.column);
    BIRKHOFF_UNROLL
    for (int j = 0; j < kGroups; ++j) {
      const std::uint32_t place_j = further_right(to, 8 * j);
      thread_.store_shared(place_j, thread_.pack(c[j][0] * factor, c[j][1] * factor));
      thread_.store_shared(place_j + 2 * 8 * kHeadDim,
                           thread_.pack(c[j][2] * factor, c[j][3] * factor));
    }
    thread_.sync_warp();
    constexpr int kRowsAtOnce = 32 / kGroups;
    const int row = first_row_ + lane_ / kGroups, column = first_column_ + lane_ % kGroups * 8;
    const int count = column < p_.head_dim ? rows_from(first) : 0;
    std::uint16_t* data =
        const_cast<std::uint16_t*>(first_of(rows, place, first)) + row * rows.strides[3] + column;
    BIRKHOFF_UNROLL_BY(4)
    for (int i = 0; i < 16; i += kRowsAtOnce) {
      if (row + i < count) {
        *reinterpret_cast<Words*>(data) =
            thread_.template load_shared<Words>(tile + place_in_tile<kHeadDim>(row + i, column));
      }
      data += kRowsAtOnce * rows.strides[3];
    }
  }

  // ---- Elements. The bits of all 64 columns are computed before the products, which need the
  // registers.

  // Bit i: is the key of element i visible to its query? Elements with the same i % 4 share a row
  // and advance by 8 columns, so the visible ones follow from the first and last visible column. A
  // mask of keys is read by the whole warp, other masks element by element. All lanes call it.
  template <bool kKeysAreRows>
  BIRKHOFF_DEVICE std::uint32_t visible_pairs(const TilePair& pair) const {
    if (!pair.diagonal && pair.mask == nullptr && pair.num_queries == kTileRows &&
        pair.num_keys == kTileRows) {
      return kAllPairs;
    }
    std::uint32_t bits = 0;
    BIRKHOFF_UNROLL
    for (int i = 0; i < 4; ++i) {
      const Place place = place_in_c(lane_, i);
      const int row = first_row_ + place.row;
      int begin = 0, end;
      if constexpr (kKeysAreRows) {
        end = row < pair.num_keys ? pair.num_queries : 0;
        if (pair.diagonal) begin = row;
      } else {
        end = row < pair.num_queries ? pair.num_keys : 0;
        if (pair.diagonal && end > row + 1) end = row + 1;
      }
      bits |= (numbers_left_of(end - place.column) & ~numbers_left_of(begin - place.column)) << i;
    }
    if (pair.mask == nullptr) return bits;
    if (pair.mask_query_stride == 0) return bits & visible_keys<kKeysAreRows>(pair);
    BIRKHOFF_UNROLL_BY(4)
    for (int i = 0; i < 32; ++i) {
      int query, key;
      this->template place_of_pair<kKeysAreRows>(i, query, key);
      if ((bits >> i & 1) != 0 &&
          !pair.mask[query * pair.mask_query_stride + key * pair.mask_key_stride]) {
        bits &= ~(1u << i);
      }
    }
    return bits;
  }
  // Bit i: does a mask that all queries share show the key of element i? All lanes call it.
  template <bool kKeysAreRows>
  BIRKHOFF_DEVICE std::uint32_t visible_keys(const TilePair& pair) const {
    std::uint32_t seen[2], bits = 0;  // seen: of keys 0 to 31 and 32 to 63
    BIRKHOFF_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int key = lane_ + 32 * half;
      seen[half] = thread_.ballot(key < pair.num_keys && pair.mask[key * pair.mask_key_stride]);
    }
    if constexpr (kKeysAreRows) {
      const std::uint32_t of_row =
          (first_row_ < 32 ? seen[0] : seen[1]) >> (first_row_ % 32 + lane_ / 4);
      if ((of_row & 1) != 0) bits |= 0x33333333;
      if ((of_row >> 8 & 1) != 0) bits |= 0xcccccccc;
    } else {
      BIRKHOFF_UNROLL
      for (int j = 0; j < kTileRows / 8; ++j) {
        const std::uint32_t two = seen[j / 4] >> (j % 4 * 8 + place_in_c(lane_, 0).column) & 3;
        bits |= (two | two << 2) << 4 * j;
      }
    }
    return bits;
  }
  // Bit 4j: is column 8j left of `end`?
  static BIRKHOFF_DEVICE std::uint32_t numbers_left_of(int end) {
    const int count = end <= 0 ? 0 : (end + 7) / 8;
    return 0x11111111 & (count >= 8 ? kAllPairs : (1u << 4 * count) - 1);
  }

  // Bit i: does dropout keep the probability of element i?
  template <bool kKeysAreRows>
  BIRKHOFF_DEVICE std::uint32_t kept_pairs(const TilePair& pair) const {
    return Tile::template kept_pairs<kKeysAreRows>(p_.dropout, noise_, [&](int query, int key) {
      return pair.element + query * p_.dropout.columns + key;
    });
  }
  // The factor of the probability of element i.
  BIRKHOFF_DEVICE float kept(std::uint32_t bits, int i) const {
    return (bits >> i & 1) != 0 ? p_.dropout.scale : 0.0f;
  }

  // Query 0's numbers in another tensor like DistanceParams::scores.
  template <typename Number>
  BIRKHOFF_DEVICE Number* numbers_of(const TilePair& pair, Number* of_queries) const {
    return of_queries + (pair.distances - p_.distances.scores);
  }
  // Adds the number of each visible pair's distance; `numbers` are query 0's. The pairs start at
  // `first_column`.
  template <bool kKeysAreRows, int kGroups>
  BIRKHOFF_DEVICE void add_numbers(LanePairs<kGroups>& s, const float* numbers,
                                   const TilePair& pair, int first_column,
                                   std::uint32_t visible) const {
    BIRKHOFF_UNROLL
    for (int i = 0; i < 4 * kGroups; ++i) {
      if ((visible >> (first_column / 2 + i) & 1) == 0) continue;
      int query, key;
      this->template place_of_pair<kKeysAreRows>(first_column / 2 + i, query, key);
      s[i / 4][i % 4] +=
          numbers[query * p_.distances.rows + p_.distances.clipped(pair.first_row + key - query)];
    }
  }
  // Backward, where values have relative positions: adds d_out . b_r to products d_out . v.
  template <bool kKeysAreRows, int kGroups>
  BIRKHOFF_DEVICE void add_value_terms(LanePairs<kGroups>& d_p, const TilePair& pair,
                                       int first_column, std::uint32_t visible) const {
    if (pair.distances == nullptr) return;
    add_numbers<kKeysAreRows>(d_p, numbers_of(pair, p_.distances.of_values), pair, first_column,
                              visible);
  }
  // Joins the pairs of the lane's queries, of `half`, to `numbers`, which are query 0's.
  template <int kGroups, typename Join>
  BIRKHOFF_DEVICE void join_by_distance(const LanePairs<kGroups>& x, int half, float* numbers,
                                        float none, const TilePair& pair, int first_column,
                                        Join join) const {
    const int query = first_row_ + lane_ / 4 + 8 * half;
    Tile::join_by_distance(
        x, half, query < pair.num_queries, numbers + query * p_.distances.rows, p_.distances.rows,
        none,
        [&](int column) {
          return p_.distances.clipped(pair.first_row + first_column + column - query);
        },
        join);
  }

  // Turns products q . k into logits times log2(e), so that 2^x applies to them; masked logits
  // become -infinity. The pairs start at `first_column`; `bias` is where load_bias() stored it.
  template <bool kKeysAreRows, int kGroups>
  BIRKHOFF_DEVICE void take_logits(LanePairs<kGroups>& s, const TilePair& pair, std::uint32_t bias,
                                   int first_column, std::uint32_t visible) const {
    if (pair.distances != nullptr) {
      add_numbers<kKeysAreRows>(s, pair.distances, pair, first_column, visible);
    }
    const float factor = p_.scale * kLog2E;
    BIRKHOFF_UNROLL
    for (int i = 0; i < 4 * kGroups; ++i) s[i / 4][i % 4] *= factor;
    if (pair.has_bias) {
      BIRKHOFF_UNROLL
      for (int i = 0; i < 4 * kGroups; ++i) {
        int query, key;
        this->template place_of_pair<kKeysAreRows>(first_column / 2 + i, query, key);
        s[i / 4][i % 4] += thread_.template load_shared<float>(bias + 4 * key);
      }
    }
    if (visible == kAllPairs) return;
    visible >>= first_column / 2;
    BIRKHOFF_UNROLL
    for (int i = 0; i < 4 * kGroups; ++i) {
      if ((visible >> i & 1) == 0) s[i / 4][i % 4] = -kInfinity;
    }
  }
};

}  // namespace birkhoff
