// The common part of the tensor-core kernels of attention over gathered rows: tiles of
// tile_attention/gpu_body.h whose rows are at the slots of a list, and pairs of slots that see
// each other. gpu_forward.h and gpu_backward.h describe what the kernels compute and own.
#pragma once

#include <cstdint>

#include "attention/kernels/gathered_attention/gpu_lists.h"
#include "attention/kernels/gathered_attention/gpu_params.h"
#include "attention/kernels/tile_attention/gpu_body.h"
#include "cluster/base/gpu/kernel_source.h"

namespace birkhoff {

// A range of p (DistanceBand): a query's range holds the p of the keys that it sees, a key's is its
// own p. Query and key see each other if their ranges meet.
struct alignas(8) PositionRange {
  static constexpr std::int64_t kLeast = -2147483647, kMost = 2147483646;  // of p
  int low = 2147483647, high = -2147483647 - 1;                            // meets none

  PositionRange() = default;
  BIRKHOFF_DEVICE PositionRange(std::int64_t new_low, std::int64_t new_high) {
    if (new_low > new_high || new_low > kMost || new_high < kLeast) return;
    low = static_cast<int>(new_low < kLeast ? kLeast : new_low);
    high = static_cast<int>(new_high > kMost ? kMost : new_high);
  }
  BIRKHOFF_DEVICE bool meets(const PositionRange& other) const {
    return low <= other.high && other.low <= high;
  }
  BIRKHOFF_DEVICE bool meets_any() const { return low <= high; }
};

// The range of a slot in a segment; slots of other segments and padding get a range that meets
// none.
template <bool kOfQuery>
BIRKHOFF_DEVICE PositionRange range_of(const GatheredParams& p, const GpuHeadLists& lists,
                                       int segment, int slot) {
  if (slot < lists.first_of(segment) || slot >= lists.ends[segment]) return {};
  const std::int64_t at = lists.p_of(p.by_rank, segment, slot);
  if constexpr (kOfQuery) return {at - p.most, at - p.least};
  if (p.key_lengths != nullptr && lists.row(slot) >= p.key_lengths[lists.head.b]) return {};
  return {at, at};
}

// A tile of a list's slots: [first, first + kTileRows), up to the segment's end; for one query head
// of those that share keys.
struct SegmentTile {
  int segment, head, first, end;
};

// Iterates over the tiles of the other list's slots that some of the slots [first, first +
// kTileRows) of the own list may see or be seen by: segment by segment, each for the query heads 0
// to group - 1. All lanes of a warp call it, and all warps come to the same result.
template <typename Thread, bool kOwnsQueries>
class MetTiles {
 public:
  BIRKHOFF_DEVICE MetTiles(const Thread& thread, const GatheredParams& p, const GpuHeadLists& own,
                           const GpuHeadLists& other, int first, int group)
      : thread_(thread),
        p_(p),
        own_(own),
        other_(other),
        own_first_(first),
        own_end_(first + kTileRows < own.used ? first + kTileRows : own.used),
        group_(group),
        head_(group - 1),
        segment_(own.segment_of(first, p.segments, lane(), [&](bool x) {
          return thread.ballot(x);
        }) - 1) {}

  // Moves to the next tile; the first call moves to the first tile. Returns false if there is none.
  BIRKHOFF_DEVICE bool next() {
    if (++head_ < group_) return true;
    head_ = 0;
    for (;;) {
      first_ += kTileRows;
      while (first_ >= end_) {
        if (!next_segment()) return false;
      }
      BIRKHOFF_UNROLL
      for (int i = 0; i < 2; ++i) {
        ranges_[i] = range_of<!kOwnsQueries>(p_, other_, segment_, first_ + lane() + 32 * i);
        const int later = first_ + kTileRows + lane() + 32 * i;
        if (later < end_) thread_.prefetch(other_.row_of + later);
      }
      if (thread_.any(hull_.meets(ranges_[0]) || hull_.meets(ranges_[1]))) return true;
    }
  }

  BIRKHOFF_DEVICE SegmentTile now() const { return {segment_, head_, first_, end_}; }

  // Stores the ranges of the tile's slots; they are visible after a barrier.
  BIRKHOFF_DEVICE void store_ranges(std::uint32_t to) const {
    if (thread_.index() >= 32) return;
    BIRKHOFF_UNROLL
    for (int i = 0; i < 2; ++i) thread_.store_shared(to + 8 * (lane() + 32 * i), ranges_[i]);
  }

 private:
  BIRKHOFF_DEVICE int lane() const { return thread_.index() % 32; }

  // Moves to the start of the next segment that has slots of the own tile.
  BIRKHOFF_DEVICE bool next_segment() {
    do {
      ++segment_;
      if (segment_ == p_.segments || own_.first_of(segment_) >= own_end_) return false;
    } while (own_.first_of(segment_) == own_.ends[segment_]);
    first_ = other_.first_of(segment_);
    end_ = other_.ends[segment_];
    hull_ = {};
    BIRKHOFF_UNROLL
    for (int i = 0; i < 2; ++i) {
      extend(range_of<kOwnsQueries>(p_, own_, segment_, own_first_ + lane() + 32 * i));
    }
    BIRKHOFF_UNROLL
    for (int mask = 1; mask < 32; mask *= 2) {
      PositionRange other;
      other.low = thread_.exchange(hull_.low, mask);
      other.high = thread_.exchange(hull_.high, mask);
      extend(other);
    }
    return true;
  }
  BIRKHOFF_DEVICE void extend(const PositionRange& other) {
    if (other.low < hull_.low) hull_.low = other.low;
    if (other.high > hull_.high) hull_.high = other.high;
  }

  const Thread& thread_;
  const GatheredParams& p_;
  const GpuHeadLists &own_, &other_;
  const int own_first_, own_end_, group_;
  int head_, segment_, first_ = 0, end_ = 0;
  PositionRange hull_;       // of the own tile's slots in the segment
  PositionRange ranges_[2];  // of the slots first + lane and first + lane + 32
};

template <int kHeadDim>
struct GatheredTilesShape : GpuTileShape<kHeadDim> {
  // Bytes of the ranges of a tile's slots, and of two tiles of rows with the ranges of one of them.
  static constexpr int kRangesBytes = kTileRows * static_cast<int>(sizeof(PositionRange));
  static constexpr int kPairBytes = 2 * GpuTileShape<kHeadDim>::kRowsBytes + kRangesBytes;
};

// The slots of a tile of queries and a tile of keys.
struct SlotPair {
  GpuHead head;  // of the queries
  const GpuHeadLists &queries, &keys;
  int first_query, first_key, segment;
};

template <typename Thread, int kHeadDim>
class GatheredTilesBody : protected TileBody<Thread, kHeadDim> {
  using Tile = TileBody<Thread, kHeadDim>;
  using Shape = GatheredTilesShape<kHeadDim>;

 public:
  static constexpr int kThreads = Shape::kThreads;

  BIRKHOFF_DEVICE GatheredTilesBody(const Thread& thread, const GatheredParams& p)
      : TileBody<Thread, kHeadDim>(thread, thread.index() / 32 / (kTileRows / 16)), p_(p) {}

 protected:
  using Tile::first_column_;
  using Tile::first_row_;
  using Tile::lane_;
  using Tile::thread_;
  using typename Tile::Columns;

  const GatheredParams& p_;

  // ---- Work distribution: thread blocks are numbered by tile, then head, then sample.

  BIRKHOFF_HOST_DEVICE static int tiles_of(const GatheredListsParams& lists) {
    return (lists.slots + kTileRows - 1) / kTileRows;
  }
  BIRKHOFF_HOST_DEVICE static std::int64_t num_tiles(const GatheredParams& p,
                                                     const GatheredListsParams& lists, int heads) {
    return std::int64_t{p.batch} * heads * tiles_of(lists);
  }
  // Sets `first` to the tile's first slot. 32 bits: a grid has fewer than 2^31 thread blocks.
  BIRKHOFF_DEVICE GpuHead head_of(const GatheredListsParams& lists, int heads, int& first) const {
    const unsigned task = static_cast<unsigned>(thread_.block()),
                   tiles = static_cast<unsigned>(tiles_of(lists)), head = task / tiles;
    first = static_cast<int>(task % tiles) * kTileRows;
    return {static_cast<int>(head) / heads, static_cast<int>(head) % heads};
  }
  BIRKHOFF_DEVICE static int rows_from(const GpuHeadLists& lists, int first) {
    return lists.used - first < kTileRows ? lists.used - first : kTileRows;
  }

  // The ranges of the slots of this lane's rows, lane / 4 and lane / 4 + 8. Returns whether any
  // of the warp's rows meets something.
  template <bool kOfQueries>
  BIRKHOFF_DEVICE bool find_ranges(PositionRange (&own)[2], const GpuHeadLists& lists, int segment,
                                   int first) const {
    BIRKHOFF_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = first_row_ + lane_ / 4 + 8 * half;
      own[half] = range_of<kOfQueries>(p_, lists, segment, first + row);
    }
    return thread_.any(own[0].meets_any() || own[1].meets_any());
  }

  // ---- Rows between global and shared memory.

  // The rows of x at the slots [first, end), as far as they fit a tile; zeros after them. Called
  // by all threads; the rows have arrived after wait() and a barrier.
  BIRKHOFF_DEVICE void load_rows(std::uint32_t tile, const RowsParams& x, GpuHead head,
                                 const GpuHeadLists& lists, int first, int end) const {
    constexpr int kGroups = kHeadDim / 8, kRowsAtOnce = Shape::kThreads / kGroups;
    const int row = thread_.index() / kGroups, column = thread_.index() % kGroups * 8;
    if (column >= p_.head_dim) end = first;
    const std::uint16_t* from = row_of<const std::uint16_t>(x, head, 0) + column;
    const std::uint32_t to = tile + place_in_tile<kHeadDim>(row, column);
    static_assert(kRowsAtOnce % 8 == 0);
    BIRKHOFF_UNROLL_BY(4)
    for (int i = 0; i < kTileRows; i += kRowsAtOnce) {
      const int slot = first + row + i;
      const bool exists = slot < end;
      thread_.template copy_async<16>(to + 2 * i * kHeadDim,
                                      from + (exists ? lists.row(slot) * x.strides[2] : 0), exists);
    }
  }

  // The tile's rows of x and y at `to`, one tile after the other, then the ranges of its slots.
  template <bool kOwnsQueries>
  BIRKHOFF_DEVICE void load_pair(std::uint32_t to, const RowsParams& x, const RowsParams& y,
                                 GpuHead head, const GpuHeadLists& lists,
                                 const MetTiles<Thread, kOwnsQueries>& tiles) const {
    const SegmentTile tile = tiles.now();
    load_rows(to, x, head, lists, tile.first, tile.end);
    load_rows(second_of(to), y, head, lists, tile.first, tile.end);
    tiles.store_ranges(ranges_of(to));
  }
  static BIRKHOFF_DEVICE std::uint32_t second_of(std::uint32_t pair) {
    return pair + Shape::kRowsBytes;
  }
  static BIRKHOFF_DEVICE std::uint32_t ranges_of(std::uint32_t pair) {
    return pair + 2 * Shape::kRowsBytes;
  }

  // For each of `tiles`: load(stage), then work(stage, tile, ranges of this lane's rows), while the
  // next tile loads if there are two stages. Warps none of whose rows meets the tile's segment do
  // not work. `own` and `first` give the slots that the thread block owns.
  template <int kStages, bool kOwnsQueries, typename Load, typename Work>
  BIRKHOFF_DEVICE void visit_tiles(MetTiles<Thread, kOwnsQueries>& tiles, const GpuHeadLists& own,
                                   int first, Load load, Work work) const {
    bool more = tiles.next();
    if (more) load(0);
    thread_.commit();
    PositionRange ranges[2];
    int of_segment = -1;  // `ranges` and `works`
    bool works = false;
    for (int stage = 0; more; stage = (stage + 1) % kStages) {
      const SegmentTile now = tiles.now();
      more = tiles.next();
      if (more && kStages == 2) load(stage ^ 1);
      thread_.commit();
      if (now.segment != of_segment) {  // while the tiles load
        works = find_ranges<kOwnsQueries>(ranges, own, now.segment, first);
        of_segment = now.segment;
      }
      thread_.template wait<kStages - 1>();
      thread_.sync();
      if (works) work(stage, now, ranges);
      thread_.sync();  // the tiles have been read
      if (more && kStages == 1) load(0);
    }
    thread_.template wait<0>();
  }

  // Writes factor * c to the warp's columns of the rows of x at the slots from `first` on, or if
  // each row has one slot at their rows; 0 where the factor is, also for values that are not
  // finite. They pass through the memory of a tile that is not read any more. Called by all
  // threads.
  BIRKHOFF_DEVICE void store_rows(const Columns& c, const float (&factor)[2], GpuHead head,
                                  const GpuHeadLists& lists, int first, const RowsParams& x,
                                  std::uint32_t tile) const {
    thread_.sync();  // all copies to the tile have arrived
    this->put_rows(
        tile, [&](int j, int r) { return factor[r / 2] == 0 ? 0.0f : c[j][r] * factor[r / 2]; });
    constexpr int kGroups = Shape::kWarpColumns / 8, kRowsAtOnce = 32 / kGroups;
    const int row = first_row_ + lane_ / kGroups, column = first_column_ + lane_ % kGroups * 8;
    const int count = column < p_.head_dim ? rows_from(lists, first) : 0;
    BIRKHOFF_UNROLL_BY(4)
    for (int i = 0; i < 16; i += kRowsAtOnce) {
      if (row + i >= count) continue;
      const int slot = first + row + i;
      auto* const to =
          row_of<std::uint16_t>(x, head, lists.lists.once ? lists.row(slot) : slot) + column;
      *reinterpret_cast<Words*>(to) =
          thread_.template load_shared<Words>(tile + place_in_tile<kHeadDim>(row + i, column));
    }
  }

  // ---- Elements. The pairs of a call start at `first_column`.

  // Bit i: does dropout keep the probability of element i of all 64 columns?
  template <bool kKeysAreRows>
  BIRKHOFF_DEVICE std::uint32_t kept_pairs(const SampleNoise& noise, const SlotPair& pair) const {
    const int first_rank = pair.first_key - pair.keys.first_of(pair.segment);
    return Tile::template kept_pairs<kKeysAreRows>(p_.dropout, noise, [&](int query, int key) {
      return p_.dropout.element(pair.head.h, pair.first_query + query, first_rank + key);
    });
  }
  // The factor of the probability of element i.
  BIRKHOFF_DEVICE float kept(std::uint32_t bits, int i) const {
    if (p_.dropout.p == 0) return 1;
    return (bits >> i & 1) != 0 ? p_.dropout.scale : 0.0f;
  }

  // Adds each pair's number for its distance, of `numbers` [B, H, L, R]; null: nothing.
  template <bool kKeysAreRows, int kGroups>
  BIRKHOFF_DEVICE void add_numbers(LanePairs<kGroups>& s, const float* numbers,
                                   const SlotPair& pair, int first_column) const {
    if (numbers == nullptr) return;
    BIRKHOFF_UNROLL
    for (int i = 0; i < 4 * kGroups; ++i) {
      int query, key;
      this->template place_of_pair<kKeysAreRows>(first_column / 2 + i, query, key);
      query += pair.first_query;
      key += pair.first_key;
      if (query >= pair.queries.used || key >= pair.keys.used) continue;
      s[i / 4][i % 4] +=
          number_of_pair(p_, numbers, pair.head, pair.queries.row(query), pair.keys.row(key));
    }
  }
  // Joins pairs whose rows are queries, of the lane's row of `half`, to `numbers` of places.
  template <int kGroups, typename Join>
  BIRKHOFF_DEVICE void join_by_distance(const LanePairs<kGroups>& x, int half, float* numbers,
                                        float none, const SlotPair& pair, int first_column,
                                        Join join) const {
    const int slot = pair.first_query + first_row_ + lane_ / 4 + 8 * half,
              used = slot < pair.queries.used ? slot : pair.first_query,
              row = pair.queries.row(used);
    const std::int64_t place = place_of_query(p_, pair.head, pair.queries, used);
    Tile::join_by_distance(
        x, half, slot == used, numbers + place * p_.distances.rows, p_.distances.rows, none,
        [&](int column) {
          // Pairs with keys that do not exist are 0, or NaN where the query's gradient is.
          const int key = pair.first_key + first_column + column, last = pair.keys.used - 1;
          return p_.distances.row_of(pair.keys.row(key < last ? key : last) - row);
        },
        join);
  }

  // Turns products q . k into logits times log2(e), -infinity where query and key do not see each
  // other. `own` are the ranges of this lane's rows; the columns' ranges were stored at `ranges`.
  template <int kGroups>
  BIRKHOFF_DEVICE void take_logits(LanePairs<kGroups>& s, const PositionRange (&own)[2],
                                   std::uint32_t ranges, int first_column) const {
    struct alignas(16) TwoRanges {
      PositionRange of[2];
    };
    const float factor = p_.scale * kLog2E;
    BIRKHOFF_UNROLL
    for (int j = 0; j < kGroups; ++j) {
      const auto other = thread_.template load_shared<TwoRanges>(
          ranges + 8 * (first_column + 8 * j + place_in_c(lane_, 0).column));
      BIRKHOFF_UNROLL
      for (int r = 0; r < 4; ++r) {
        s[j][r] = own[r / 2].meets(other.of[r % 2]) ? s[j][r] * factor : -kInfinity;
      }
    }
  }
};

}  // namespace birkhoff
