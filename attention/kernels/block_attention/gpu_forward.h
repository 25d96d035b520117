// Softmax attention of blocks of queries to their lists of keys. Legend: i query of a block, j key
// of the block's list (KeyTiles), d of D.
//
//   s_ij = scale (sum_d q_id k_jd + t_ij) + bias_j,  m_i = max_j s_ij,
//   z_i = 1 / sum_j exp(s_ij - m_i),  p_ij = exp(s_ij - m_i) z_i,  out_id = sum_j p_ij M_ij v_jd,
//
// over the keys j that i sees; M_ij is 1, or under dropout 0 or 1 / (1 - p). t_ij is the term of
// j's distance (DistanceParams), if there are relative positions. A sink is one more logit in m and
// z. A query that sees no key has out = 0 and m = z = 0. m is stored times log2(e), and separately
// from z: a single log-sum-exp would lose the digits of large logits to rounding. If values have
// relative positions, the sums of p_ij M_ij over the keys of each distance are stored, too; their
// product with the table is then added to out (gpu_terms.h).
//
// A thread block owns a tile of queries of one head; with grouped queries, several heads read the
// same keys. A warp owns 16 of these queries and, for D > 128, half of the columns of `out` (both
// halves then compute the same s). Shared memory holds the tile of q, the tiles of k and v that are
// in use and those that come next, and biases: 40, 80 and 160 KiB for D = 64, 128 and 256. s, p and
// out stay in registers. Products are 16-bit with fp32 sums; everything else is fp32. Keys are
// taken in the order of the list, and thread blocks share nothing: the same bits each time.
#pragma once

#include "attention/kernels/block_attention/gpu_body.h"

namespace birkhoff {

// kValues: whether values have relative positions.
template <typename Thread, int kHeadDim, bool kValues>
class BlockAttentionForward : public BlockAttentionBody<Thread, kHeadDim, 1> {
  using Body = BlockAttentionBody<Thread, kHeadDim, 1>;
  using typename Body::Columns;
  using Pairs = LanePairs<kTileRows / 8>;
  using Shape = GpuTileShape<kHeadDim>;
  using Body::first_column_;
  using Body::first_row_;
  using Body::lane_;
  using Body::p_;
  using Body::thread_;

  static constexpr std::uint32_t kQ = 0,
                                 kBias = (1 + 2 * Shape::kForwardStages) * Shape::kRowsBytes;

 public:
  static constexpr int kThreadBlocks = kHeadDim > 64 ? 1 : kValues ? 2 : 4;
  static constexpr int kSharedBytes = kBias + Shape::kNumbersBytes;
  static_assert(kSharedBytes <= Shape::kMaxBytes);

  using Body::Body;

  // The number of thread blocks.
  static std::int64_t num_tasks(const BlockAttentionParams& p) {
    return Body::num_parts(p, p.heads);
  }

  BIRKHOFF_DEVICE void run() {
    int first_query;
    const BlockPlace place =
        this->place_of(static_cast<unsigned>(thread_.block()), p_.heads, first_query);
    this->find_noise(place.batch);

    this->load_rows(kQ, p_.q, place, first_query);
    KeyTiles<KeySourceParams> keys = this->keys_of(place, first_query);
    bool more = keys.next();
    if (more) load_keys(keys, place, 0);
    thread_.commit();

    Columns out = {};
    // Of rows lane / 4 and lane / 4 + 8.
    float maximum[2] = {-kInfinity, -kInfinity}, sum[2] = {0, 0};
    for (int stage = 0; more; stage ^= 1) {
      const KeyTiles<KeySourceParams> now = keys;
      more = keys.next();
      if (more) load_keys(keys, place, stage ^ 1);
      thread_.commit();
      // Work that needs no tile, while the tiles load.
      this->load_bias(kBias, p_.sources[now.source()].bias, this->key_place(place),
                      now.first_key());
      const TilePair pair = this->pair_of(place, first_query, now);
      const std::uint32_t visible = this->template visible_pairs<false>(pair);
      const std::uint32_t kept = this->template kept_pairs<false>(pair);
      thread_.template wait<1>();
      thread_.sync();
      if (first_row_ < pair.num_queries) {
        Pairs s = {};
        this->multiply_rows(s, kQ, k_tile(stage), 0);
        this->template take_logits<false>(s, pair, kBias, 0, visible);
        this->take_softmax(s, maximum, sum, out);
        if (p_.dropout.p > 0) {
          BIRKHOFF_UNROLL
          for (int i = 0; i < 32; ++i) s[i / 4][i % 4] *= this->kept(kept, i);
        }
        if (kValues && pair.distances != nullptr && first_column_ == 0) {
          join_probabilities(s, maximum, pair);
        }
        this->multiply_columns(out, s, v_tile(stage), 0);
      }
      thread_.sync();  // the tiles have been read
    }
    thread_.template wait<0>();
    thread_.sync();
    finish(out, maximum, sum, place, first_query);
  }

 private:
  static BIRKHOFF_DEVICE std::uint32_t k_tile(int stage) {
    return (1 + 2 * stage) * Shape::kRowsBytes;
  }
  static BIRKHOFF_DEVICE std::uint32_t v_tile(int stage) {
    return (2 + 2 * stage) * Shape::kRowsBytes;
  }

  BIRKHOFF_DEVICE void load_keys(const KeyTiles<KeySourceParams>& keys, const BlockPlace& place,
                                 int stage) const {
    this->load_key_rows(k_tile(stage), v_tile(stage), keys, place);
  }

  BIRKHOFF_DEVICE void join_probabilities(const Pairs& s, const float (&maximum)[2],
                                          const TilePair& pair) const {
    BIRKHOFF_UNROLL
    for (int half = 0; half < 2; ++half) {
      this->join_by_distance(s, half, this->numbers_of(pair, p_.distances.p), -kInfinity, pair, 0,
                             [&](float number, float value) {
                               return this->logarithm_of(number, value, maximum[half]);
                             });
    }
  }

  BIRKHOFF_DEVICE void finish(Columns& out, const float (&maximum)[2], const float (&sum)[2],
                              const BlockPlace& place, int first_query) const {
    if (first_row_ >= this->rows_from(first_query)) return;
    const SinkParams& sinks = p_.sinks;
    const bool has_sink = sinks.data != nullptr;
    const float sink =
        has_sink ? kLog2E * thread_.unpack(sinks.data[place.head * sinks.stride]) : 0;
    BIRKHOFF_UNROLL
    for (int half = 0; half < 2; ++half) {
      float total = sum[half], largest = maximum[half];
      const float correction = this->finish_softmax(largest, total, has_sink, sink);
      const float inverse = total == 0 ? 0 : 1 / total;
      BIRKHOFF_UNROLL
      for (int j = 0; j < Shape::kWarpColumns / 8; ++j) {
        out[j][2 * half] *= inverse * correction;
        out[j][2 * half + 1] *= inverse * correction;
      }
      const int row = first_row_ + lane_ / 4 + 8 * half;
      if (first_column_ == 0 && lane_ % 4 == 0 && row < this->rows_from(first_query)) {
        const std::int64_t number = this->query_number(place, first_query) + row;
        p_.max[number] = largest == -kInfinity ? 0 : largest;
        p_.inverse_sum[number] = inverse;
      }
      if (!kValues || first_column_ != 0) continue;
      thread_.sync_warp();  // the other lanes of the row have joined theirs
      if (row >= this->rows_from(first_query)) continue;
      const std::int64_t number = this->query_number(place, first_query) + row;
      this->take_probabilities(p_.distances.p + number * p_.distances.rows, p_.distances.rows,
                               largest, inverse);
    }
    this->store_rows(out, 1, 0, p_.out, place, first_query);  // where q was
  }
};

}  // namespace birkhoff
