// Attention over gathered rows on tensor cores: o, m and l of each slot, or of each query if it has
// one slot. gathered_attention/gpu_gathered.cu has the formulas, and GatheredParams::tensor_cores
// says for which calls.
//
// A thread block owns a tile of kTileRows successive slots of queries of a head, which may be in
// several segments, and takes the tiles of keys of these segments one after another; tiles of
// which its queries see nothing are not read. A warp owns 16 of the queries and, for D > 128, half
// of the columns of o. Shared memory holds the tile of q, and k, v and ranges of the tile in use
// and the next one: 41, 81 and 161 KiB for D = 64, 128 and 256. Products are 16-bit with fp32
// sums. Each element has one owner, which adds in a fixed order: the same bits each time.
#pragma once

#include "attention/kernels/gathered_attention/tiles/gpu_body.h"

namespace birkhoff {

// kTerms: whether there are relative positions or dropout.
template <typename Thread, int kHeadDim, bool kTerms>
class GatheredTilesForward : public GatheredTilesBody<Thread, kHeadDim> {
  using Body = GatheredTilesBody<Thread, kHeadDim>;
  using typename Body::Columns;
  using Pairs = LanePairs<kTileRows / 8>;
  using Shape = GatheredTilesShape<kHeadDim>;
  using Body::first_column_;
  using Body::lane_;
  using Body::p_;
  using Body::thread_;

  // Shared memory: q; k, v and the keys' ranges of each stage.
  static constexpr std::uint32_t kQ = 0, kStages = Shape::kRowsBytes;

 public:
  static constexpr int kThreadBlocks = kHeadDim > 64 ? 1 : kTerms ? 2 : 3;
  static constexpr int kSharedBytes = kStages + Shape::kForwardStages * Shape::kPairBytes;
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

    this->load_rows(kQ, p_.q, head, queries, first, queries.used);
    MetTiles<Thread, true> tiles(thread_, p_, queries, keys, first, 1);
    SampleNoise noise;
    if constexpr (kTerms) noise = SampleNoise(p_.dropout, head.b);
    Columns out = {};
    // Of rows lane / 4 and lane / 4 + 8.
    float maximum[2] = {-kInfinity, -kInfinity}, sum[2] = {0, 0};
    this->template visit_tiles<Shape::kForwardStages>(
        tiles, queries, first,
        [&](int stage) { this->load_pair(k_tile(stage), p_.k, p_.v, of_keys, keys, tiles); },
        [&](int stage, const SegmentTile& now, const PositionRange(&own)[2]) {
          const SlotPair pair{head, queries, keys, first, now.first, now.segment};
          Pairs s = {};
          this->multiply_rows(s, kQ, k_tile(stage), 0);
          if constexpr (kTerms) {
            this->template add_numbers<false>(s, p_.distances.scores, pair, 0);
          }
          this->take_logits(s, own, Body::ranges_of(k_tile(stage)), 0);
          this->take_softmax(s, maximum, sum, out);
          if constexpr (kTerms) take_terms(s, maximum, pair, noise);
          this->multiply_columns(out, s, Body::second_of(k_tile(stage)), 0);
        });
    finish(out, maximum, sum, head, queries, first);
  }

 private:
  static BIRKHOFF_DEVICE std::uint32_t k_tile(int stage) {
    return kStages + stage * Shape::kPairBytes;
  }
  // Dropout, and the sums for relative positions of values.
  BIRKHOFF_DEVICE void take_terms(Pairs& s, const float (&maximum)[2], const SlotPair& pair,
                                  const SampleNoise& noise) const {
    if (p_.dropout.p > 0) {
      const std::uint32_t kept = this->template kept_pairs<false>(noise, pair);
      BIRKHOFF_UNROLL
      for (int i = 0; i < 32; ++i) s[i / 4][i % 4] *= this->kept(kept, i);
    }
    if (p_.distances.p == nullptr || first_column_ != 0) return;
    BIRKHOFF_UNROLL
    for (int half = 0; half < 2; ++half) {
      this->join_by_distance(s, half, p_.distances.p, -kInfinity, pair, 0,
                             [&](float number, float value) {
                               return this->logarithm_of(number, value, maximum[half]);
                             });
    }
  }

  BIRKHOFF_DEVICE void finish(const Columns& out, const float (&maximum)[2], const float (&sum)[2],
                              GpuHead head, const GpuHeadLists& queries, int first) const {
    constexpr float kLn2 = 0.6931471805599453f;
    const bool has_sink = p_.sink != nullptr;
    const float sink = has_sink ? kLog2E * p_.sink[head.h] : 0;
    const int count = this->rows_from(queries, first);
    float factor[2];
    BIRKHOFF_UNROLL
    for (int half = 0; half < 2; ++half) {
      float total = sum[half], largest = maximum[half];
      const float correction = this->finish_softmax(largest, total, has_sink, sink);
      factor[half] = total == 0 ? 0 : correction / total;
      const int row = this->first_row_ + lane_ / 4 + 8 * half;
      if (first_column_ == 0 && lane_ % 4 == 0 && row < count) {
        const bool once = p_.queries.once;
        const std::int64_t at = place_of_query(p_, head, queries, first + row);
        (once ? p_.max : p_.slot_max)[at] = total > 0 ? largest * kLn2 : 0;
        (once ? p_.sum : p_.slot_sum)[at] = total;
      }
      if constexpr (kTerms) {
        if (p_.distances.p == nullptr || first_column_ != 0) continue;
        thread_.sync_warp();  // the other lanes of the row have joined theirs
        if (row >= count) continue;
        const std::int64_t place = place_of_query(p_, head, queries, first + row);
        this->take_probabilities(p_.distances.p + place * p_.distances.rows, p_.distances.rows,
                                 largest, total == 0 ? 0 : 1 / total);
      }
    }
    this->store_rows(out, factor, head, queries, first, p_.slot_out, kQ);
  }
};

}  // namespace birkhoff
