// The common part of the tensor-core kernels of row_attention.h: tiles of tile_attention/gpu_body.h
// whose queries see ranges of keys. gpu_top_k.h and gpu_entmax.h describe what the kernels compute
// and own. Legend: i query, j key.
#pragma once

#include <cstdint>

#include "attention/kernels/row_normalizer/gpu_params.h"
#include "attention/kernels/tile_attention/gpu_body.h"
#include "cluster/base/gpu/kernel_source.h"

namespace birkhoff {

// Keys [first, end).
struct alignas(8) KeyRange {
  int first = 0, end = 0;

  BIRKHOFF_DEVICE bool holds(int key) const { return first <= key && key < end; }
};

template <typename Thread, int kHeadDim, typename Params>
class RowTilesBody : protected TileBody<Thread, kHeadDim> {
  using Tile = TileBody<Thread, kHeadDim>;
  using Shape = GpuTileShape<kHeadDim>;
  static_assert(Shape::kWarpsOfRow == 1);

 public:
  static constexpr int kThreads = Shape::kThreads;

  BIRKHOFF_DEVICE RowTilesBody(const Thread& thread, const Params& p)
      : TileBody<Thread, kHeadDim>(thread, 0), p_(p) {}

 protected:
  using Tile::first_row_;
  using Tile::lane_;
  using Tile::thread_;
  using typename Tile::Columns;

  const Params& p_;

  // ---- Work distribution: thread blocks are numbered by tile, the last first (in causal attention
  // it takes the longest), then head, then sample.

  BIRKHOFF_HOST_DEVICE static std::int64_t num_tiles(const Params& p, int rows) {
    return std::int64_t{p.batch} * p.heads * tiles_of(rows);
  }
  // Sets `first` to the tile's first row. 32 bits: a grid has fewer than 2^31 thread blocks.
  BIRKHOFF_DEVICE GpuHead head_of(int rows, int& first) const {
    const unsigned task = static_cast<unsigned>(thread_.block()),
                   tiles = static_cast<unsigned>(tiles_of(rows)), head = task / tiles;
    first = static_cast<int>(tiles - 1 - task % tiles) * kTileRows;
    return {static_cast<int>(head) / p_.heads, static_cast<int>(head) % p_.heads};
  }
  // The index of a row in [B, H, rows].
  BIRKHOFF_DEVICE std::int64_t number_of(GpuHead head, int rows, int row) const {
    return (std::int64_t{head.b} * p_.heads + head.h) * rows + row;
  }

  // ---- Ranges of keys.

  // Of a query; empty if it does not exist.
  BIRKHOFF_DEVICE KeyRange range_of(int sample, int query) const {
    if (query >= p_.queries) return {};
    const std::int64_t at = std::int64_t{sample} * p_.queries + query;
    const int end = p_.end[at];
    return {p_.first[at], end < p_.keys ? end : p_.keys};
  }
  // A query of this lane's rows, lane / 4 and lane / 4 + 8.
  struct OwnQuery {
    KeyRange keys;
    std::int64_t term;  // the index of that of key 0
  };
  BIRKHOFF_DEVICE void find_queries(OwnQuery (&own)[2], GpuHead head, int first_query) const {
    BIRKHOFF_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int query = query_of(first_query, half);
      own[half] = {range_of(head.b, query), p_.term_of(head, query, 0)};
    }
  }
  BIRKHOFF_DEVICE int query_of(int first_query, int half) const {
    return first_query + first_row_ + lane_ / 4 + 8 * half;
  }
  // From the first to the last key that any query of a tile sees. All lanes of a warp call it.
  BIRKHOFF_DEVICE KeyRange hull_of(int sample, int first_query) const {
    KeyRange hull{p_.keys, 0};
    BIRKHOFF_UNROLL
    for (int i = 0; i < kTileRows; i += 32) {
      const KeyRange range = range_of(sample, first_query + lane_ + i);
      if (range.first < range.end) extend(hull, range);
    }
    BIRKHOFF_UNROLL
    for (int mask = 1; mask < 32; mask *= 2) {
      const int first = thread_.exchange(hull.first, mask), end = thread_.exchange(hull.end, mask);
      extend(hull, {first, end});
    }
    return hull;
  }

  // ---- Rows of a head between global and shared memory, 16 bytes at a time.

  // The rows of x from `first` on, of `all`, to a tile; zeros elsewhere. Called by all threads; the
  // rows have arrived after wait() and a barrier.
  BIRKHOFF_DEVICE void load_rows(std::uint32_t tile, const RowsParams& x, GpuHead head, int first,
                                 int all) const {
    Tile::load_rows(tile, row_of<const std::uint16_t>(x, head, first), x.strides[2], all - first,
                    p_.head_dim);
  }

  // Stores factor * c to the warp's rows of x. They pass through `tile`, where no other warp uses
  // them.
  BIRKHOFF_DEVICE void store_rows(const Columns& c, float factor, std::uint32_t tile,
                                  const RowsParams& x, GpuHead head, int first, int all) const {
    Tile::store_rows(c, factor, tile, row_of<std::uint16_t>(x, head, first), x.strides[2],
                     all - first, p_.head_dim);
  }

  // Calls load(first, stage) and then work(first, stage) for tiles of rows, of which next(first)
  // names the first row: of the next tile, or -1. The next tile loads during the work.
  template <typename Next, typename Load, typename Work>
  BIRKHOFF_DEVICE void visit_tiles(int first, Next next, Load load, Work work) const {
    if (first >= 0) load(first, 0);
    thread_.commit();
    for (int stage = 0; first >= 0; stage ^= 1) {
      const int now = first;
      first = next(now);
      if (first >= 0) load(first, stage ^ 1);
      thread_.commit();
      thread_.template wait<1>();
      thread_.sync();
      work(now, stage);
      thread_.sync();  // the tiles have been read
    }
    thread_.template wait<0>();
  }
  // The same for the tiles of keys that the queries of a tile see.
  template <typename Load, typename Work>
  BIRKHOFF_DEVICE void visit_keys(const KeyRange& hull, Load load, Work work) const {
    visit_tiles(
        hull.first < hull.end ? hull.first / kTileRows * kTileRows : -1,
        [&](int now) { return now + kTileRows < hull.end ? now + kTileRows : -1; }, load, work);
  }

  // ---- Elements.

  // The column of element i of a lane's pairs, whose first column is `first`.
  BIRKHOFF_DEVICE int column_of(int first, int i) const {
    return first + i / 4 * 8 + place_in_c(lane_, i % 4).column;
  }

  // Turns products of this lane's queries with the keys from `first` on into scores, `factor` times
  // them and the terms of distances; -infinity where a query does not see the key.
  template <int kGroups>
  BIRKHOFF_DEVICE void take_scores(LanePairs<kGroups>& s, const OwnQuery (&own)[2], int first,
                                   float factor) const {
    if (p_.terms != nullptr) {
      BIRKHOFF_UNROLL
      for (int i = 0; i < 4 * kGroups; ++i) {
        const OwnQuery& query = own[i % 4 / 2];
        const int key = column_of(first, i);
        if (query.keys.holds(key)) s[i / 4][i % 4] += p_.terms[query.term + key];
      }
    }
    BIRKHOFF_UNROLL
    for (int i = 0; i < 4 * kGroups; ++i) s[i / 4][i % 4] *= factor;
    const int end = first + 8 * kGroups;
    bool sees_all = true;
    BIRKHOFF_UNROLL
    for (const OwnQuery& query : own) {
      sees_all &= query.keys.first <= first && end <= query.keys.end;
    }
    if (!thread_.any(!sees_all)) return;
    BIRKHOFF_UNROLL
    for (int i = 0; i < 4 * kGroups; ++i) {
      s[i / 4][i % 4] =
          own[i % 4 / 2].keys.holds(column_of(first, i)) ? s[i / 4][i % 4] : -kInfinity;
    }
  }

 private:
  BIRKHOFF_HOST_DEVICE static int tiles_of(int rows) { return (rows + kTileRows - 1) / kTileRows; }
  BIRKHOFF_DEVICE static void extend(KeyRange& hull, const KeyRange& other) {
    if (other.first < hull.first) hull.first = other.first;
    if (other.end > hull.end) hull.end = other.end;
  }
};

}  // namespace birkhoff
