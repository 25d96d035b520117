// Gradients of gpu_forward.h for each slot (gathered_attention/gpu_gathered.cu has the formulas),
// with p recomputed from M and Z.
//
// kTerms: whether there are relative positions or dropout.
//
// GatheredTilesQueries: a thread block owns a tile of slots of queries of a head and computes
// their d_q from the tiles of keys that they see.
//
// GatheredTilesKeys: a thread block owns a tile of slots of keys of a key head and computes d_k
// and d_v from the tiles of queries that see them, each query head by query head, with the keys as
// rows of p.
//
// A warp owns 16 slots and, for D > 128, half of the columns. Shared memory, for D = 64, 128 and
// 256: 49, 97 and 129 KiB for queries, 51, 99 and 130 KiB for keys. Products are 16-bit with fp32
// sums; p and ds are rounded to 16 bits between products; everything else is fp32. Each element has
// one owner, which adds in a fixed order: the same bits each time.
#pragma once

#include "attention/kernels/gathered_attention/tiles/gpu_body.h"

namespace birkhoff {

template <typename Thread, int kHeadDim, bool kTerms>
class GatheredTilesQueries : public GatheredTilesBody<Thread, kHeadDim> {
  using Body = GatheredTilesBody<Thread, kHeadDim>;
  using typename Body::Columns;
  using Pairs = LanePairs<kAtOnce / 8>;
  using Shape = GatheredTilesShape<kHeadDim>;
  using Body::first_row_;
  using Body::lane_;
  using Body::p_;
  using Body::thread_;

  // Shared memory: q and d_out; k, v and the keys' ranges of each stage.
  static constexpr std::uint32_t kQ = 0, kDOut = Shape::kRowsBytes, kStages = 2 * kDOut;

 public:
  static constexpr int kThreadBlocks = kHeadDim > 64 ? 1 : kTerms ? 2 : 3;
  static constexpr int kSharedBytes = kStages + Shape::kBackwardStages * Shape::kPairBytes;
  static_assert(kSharedBytes <= Shape::kMaxBytes);

  using Body::Body;

  // The number of thread blocks.
  static std::int64_t num_tasks(const GatheredParams& p) {
    return Body::num_tiles(p, p.queries, p.heads);
  }

  BIRKHOFF_DEVICE void run() {
    int first;
    const GpuHead head = this->head_of(p_.queries, p_.heads, first),
                  of_keys = key_head(p_, head, p_.heads);
    const GpuHeadLists queries(p_.queries, of_keys, p_.segments),
        keys(p_.keys, of_keys, p_.segments);
    if (first >= queries.used) return;
    const int count = this->rows_from(queries, first);

    this->load_rows(kQ, p_.q, head, queries, first, queries.used);
    this->load_rows(kDOut, p_.d_out, head, queries, first, queries.used);
    MetTiles<Thread, true> tiles(thread_, p_, queries, keys, first, 1);
    // Of rows lane / 4 and lane / 4 + 8.
    float maximum[2], inverse[2], delta[2];
    BIRKHOFF_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = first_row_ + lane_ / 4 + 8 * half;
      const QueryStatistics query(p_, head, queries, first + (row < count ? row : 0));
      maximum[half] = kLog2E * query.M;
      inverse[half] = query.inverse_Z;
      delta[half] = query.delta;
    }
    SampleNoise noise;
    if constexpr (kTerms) noise = SampleNoise(p_.dropout, head.b);
    Columns d_q = {};
    this->template visit_tiles<Shape::kBackwardStages>(
        tiles, queries, first,
        [&](int stage) { this->load_pair(k_tile(stage), p_.k, p_.v, of_keys, keys, tiles); },
        [&](int stage, const SegmentTile& now, const PositionRange(&own)[2]) {
          const SlotPair pair{head, queries, keys, first, now.first, now.segment};
          std::uint32_t kept = kAllPairs;
          if constexpr (kTerms) kept = this->template kept_pairs<false>(noise, pair);
          BIRKHOFF_UNROLL_BY(1)
          for (int j = 0; j < kTileRows; j += kAtOnce) {
            Pairs p = {}, d_s = {};
            this->multiply_rows(p, kQ, k_tile(stage), j);
            if constexpr (kTerms) {
              this->template add_numbers<false>(p, p_.distances.scores, pair, j);
            }
            this->take_logits(p, own, Body::ranges_of(k_tile(stage)), j);
            this->multiply_rows(d_s, kDOut, Body::second_of(k_tile(stage)), j);
            if constexpr (kTerms) {
              this->template add_numbers<false>(d_s, p_.distances.of_values, pair, j);
            }
            BIRKHOFF_UNROLL
            for (int i = 0; i < 4 * (kAtOnce / 8); ++i) {
              const int half = i % 4 / 2;
              const float share = thread_.exp2(p[i / 4][i % 4] - maximum[half]) * inverse[half],
                          factor = kTerms ? this->kept(kept >> j / 2, i) : 1;
              d_s[i / 4][i % 4] = share * (d_s[i / 4][i % 4] * factor - delta[half]);
              p[i / 4][i % 4] = share * factor;
            }
            if constexpr (kTerms) add_up(p, d_s, pair, j);
            this->multiply_columns(d_q, d_s, k_tile(stage), j);
          }
        });
    this->store_rows(d_q, {p_.scale, p_.scale}, head, queries, first, p_.d_q_slots, kQ);
  }

 private:
  static BIRKHOFF_DEVICE std::uint32_t k_tile(int stage) {
    return kStages + stage * Shape::kPairBytes;
  }

  // Adds pairs to the sums of their distances.
  BIRKHOFF_DEVICE void add_up(const Pairs& p, const Pairs& d_s, const SlotPair& pair,
                              int first_column) const {
    if (p_.distances.scores == nullptr || this->first_column_ != 0) return;
    const auto sum = [](float a, float b) { return a + b; };
    BIRKHOFF_UNROLL
    for (int half = 0; half < 2; ++half) {
      this->join_by_distance(d_s, half, p_.distances.d_s, 0, pair, first_column, sum);
      if (p_.distances.p == nullptr) continue;
      this->join_by_distance(p, half, p_.distances.p, 0, pair, first_column, sum);
    }
  }
};

template <typename Thread, int kHeadDim, bool kTerms>
class GatheredTilesKeys : public GatheredTilesBody<Thread, kHeadDim> {
  using Body = GatheredTilesBody<Thread, kHeadDim>;
  using typename Body::Columns;
  // Fewer at once for wide heads, whose results need the registers.
  static constexpr int kQueriesAtOnce = kHeadDim == 64 ? kAtOnce : kAtOnce / 2;
  using Pairs = LanePairs<kQueriesAtOnce / 8>;
  using Shape = GatheredTilesShape<kHeadDim>;
  using Body::p_;
  using Body::thread_;

  // Shared memory: k and v; q, d_out, the queries' ranges, maximum, inverse sum and delta of each
  // stage.
  static constexpr std::uint32_t kK = 0, kV = Shape::kRowsBytes, kStages = 2 * kV,
                                 kStageBytes = Shape::kPairBytes + 3 * Shape::kNumbersBytes;

 public:
  static constexpr int kThreadBlocks = kHeadDim == 64 ? 2 : 1;
  static constexpr int kSharedBytes = kStages + Shape::kBackwardStages * kStageBytes;
  static_assert(kSharedBytes <= Shape::kMaxBytes);

  using Body::Body;

  // The number of thread blocks.
  static std::int64_t num_tasks(const GatheredParams& p) {
    return Body::num_tiles(p, p.keys, p.key_heads);
  }

  BIRKHOFF_DEVICE void run() {
    int first;
    const GpuHead head = this->head_of(p_.keys, p_.key_heads, first);
    const GpuHeadLists queries(p_.queries, head, p_.segments), keys(p_.keys, head, p_.segments);
    if (first >= keys.used) return;

    this->load_rows(kK, p_.k, head, keys, first, keys.used);
    this->load_rows(kV, p_.v, head, keys, first, keys.used);
    MetTiles<Thread, false> tiles(thread_, p_, keys, queries, first, p_.heads / p_.key_heads);
    SampleNoise noise;
    if constexpr (kTerms) noise = SampleNoise(p_.dropout, head.b);
    Columns d_k = {}, d_v = {};
    this->template visit_tiles<Shape::kBackwardStages>(
        tiles, keys, first, [&](int stage) { load_queries(tiles, queries, stage); },
        [&](int stage, const SegmentTile& now, const PositionRange(&own)[2]) {
          const std::uint32_t d_out_tile = Body::second_of(q_tile(stage));
          const SlotPair pair{query_head(head, now), queries, keys, now.first, first, now.segment};
          std::uint32_t kept = kAllPairs;
          if constexpr (kTerms) kept = this->template kept_pairs<true>(noise, pair);
          BIRKHOFF_UNROLL_BY(1)
          for (int i = 0; i < kTileRows; i += kQueriesAtOnce) {
            Pairs p = {}, d_s = {};
            this->multiply_rows(p, kK, q_tile(stage), i);
            if constexpr (kTerms) {
              this->template add_numbers<true>(p, p_.distances.scores, pair, i);
            }
            this->take_logits(p, own, Body::ranges_of(q_tile(stage)), i);
            this->multiply_rows(d_s, kV, d_out_tile, i);
            if constexpr (kTerms) {
              this->template add_numbers<true>(d_s, p_.distances.of_values, pair, i);
            }
            this->take_gradient(p, d_s, numbers(stage) + 4 * i, kLog2E, [&](int element) {
              return kTerms ? this->kept(kept >> i / 2, element) : 1.0f;
            });
            this->multiply_columns(d_v, p, d_out_tile, i);
            this->multiply_columns(d_k, d_s, q_tile(stage), i);
          }
        });
    this->store_rows(d_k, {p_.scale, p_.scale}, head, keys, first, p_.d_k_slots, kK);
    this->store_rows(d_v, {1, 1}, head, keys, first, p_.d_v_slots, kV);
  }

 private:
  static BIRKHOFF_DEVICE std::uint32_t q_tile(int stage) { return kStages + stage * kStageBytes; }
  static BIRKHOFF_DEVICE std::uint32_t numbers(int stage) {
    return Body::ranges_of(q_tile(stage)) + Shape::kRangesBytes;
  }

  BIRKHOFF_DEVICE GpuHead query_head(GpuHead of_keys, const SegmentTile& tile) const {
    return {of_keys.b, of_keys.h * (p_.heads / p_.key_heads) + tile.head};
  }

  // Loads q and d_out, then maximum, inverse sum and delta of each query; zeros for queries that do
  // not exist.
  BIRKHOFF_DEVICE void load_queries(const MetTiles<Thread, false>& tiles,
                                    const GpuHeadLists& queries, int stage) const {
    const SegmentTile tile = tiles.now();
    const GpuHead head = query_head(queries.head, tile);
    this->load_pair(q_tile(stage), p_.q, p_.d_out, head, queries, tiles);
    const int row = thread_.index();
    if (row >= kTileRows) return;
    const bool exists = tile.first + row < tile.end;
    const std::int64_t at = exists ? statistics_of(p_, head, queries, tile.first + row) : 0;
    const std::uint32_t to = numbers(stage) + 4 * row;
    thread_.template copy_async<4>(to, maxima_of(p_) + at, exists);
    thread_.template copy_async<4>(to + Shape::kNumbersBytes, p_.inverse + at, exists);
    thread_.template copy_async<4>(to + 2 * Shape::kNumbersBytes, p_.delta + at, exists);
  }
};

}  // namespace birkhoff
