// Softmax attention of blocks of queries to their lists of keys. Legend: i query of a block, j key
// of the block's list (KeyTiles), d of D.
//
//   s_ij = scale (sum_d q_id k_jd + t_ij) + bias_j,  m_i = max_j s_ij,
//   z_i = 1 / sum_j exp(s_ij - m_i),  p_ij = exp(s_ij - m_i) z_i,  out_id = sum_j p_ij M_ij v_jd,
//
// over the keys j that i sees; M_ij is 1, or under dropout 0 or 1 / (1 - p). t_ij is the number of
// j's distance (DistanceParams), if there are relative positions. A sink is one more logit in m and
// z. A query that sees no key has out = 0 and m = z = 0. m is stored times log2(e), and separately
// from z: a single log-sum-exp would lose the digits of large logits to rounding.
//
// A thread block owns kTiles tiles of queries of one head: one, or, for blocks of 65 to 128 and D <=
// 128, both tiles of a block, which then load each tile of keys once. With grouped queries, several
// heads read the same keys. A warp owns 16 of these queries and, for D > 128, half of the columns
// of `out` (both halves then compute the same s). Shared memory holds the tiles of q, the tiles of
// k and v that are in use and those that come next, and biases: 40, 80 and 160 KiB for D = 64, 128
// and 256; 48 and 96 KiB for two tiles of queries. s, p and out stay in registers. Products are
// 16-bit with fp32 sums; everything else is fp32. Keys are taken in the order of the list, and
// thread blocks share nothing: the same bits each time.
#pragma once

#include "attention/kernels/block_attention/gpu_body.h"

namespace birkhoff {

template <typename Thread, int kHeadDim, int kTiles>
class BlockAttentionForward : BlockAttentionBody<Thread, kHeadDim, kTiles> {
  using Body = BlockAttentionBody<Thread, kHeadDim, kTiles>;
  using typename Body::Columns;
  using Pairs = typename Body::template Pairs<kTileRows / 8>;
  using Shape = GpuTileShape<kHeadDim>;
  using Body::first_column_;
  using Body::first_row_;
  using Body::kInfinity;
  using Body::lane_;
  using Body::p_;
  using Body::thread_;
  using Body::tile_;

  static constexpr std::uint32_t kQ = 0, kKeys = kTiles * Shape::kRowsBytes,
                                 kBias = kKeys + 2 * Shape::kForwardStages * Shape::kRowsBytes;

 public:
  static constexpr int kThreadBlocks = kHeadDim == 64 ? 4 / kTiles : 1;
  static constexpr int kSharedBytes = kBias + Shape::kNumbersBytes;
  static_assert(kSharedBytes <= Shape::kMostBytes);

  using Body::Body;
  using Body::kThreads;

  // The number of thread blocks.
  static std::int64_t num_tasks(const BlockAttentionParams& p) {
    return Body::num_parts(p, p.heads);
  }

  BIRKHOFF_DEVICE void run() {
    int first_query;
    const BlockPlace place =
        this->place_of(static_cast<unsigned>(thread_.block()), p_.heads, first_query);
    this->find_noise(place.batch);

    this->load_rows(q_tile(), p_.q, place, first_query);
    KeyTiles<KeySourceParams> keys = this->keys_of(place, first_query);
    load_next_keys(keys, place, 0);

    Columns out = {};
    // Of rows lane / 4 and lane / 4 + 8.
    float maximum[2] = {-kInfinity, -kInfinity}, sum[2] = {0, 0};
    for (int stage = 0; keys.next(); stage ^= 1) {
      load_next_keys(keys, place, stage ^ 1);
      // Work that needs no tile, while the tiles load.
      this->load_bias(kBias, p_.sources[keys.source()].bias, this->key_place(place),
                      keys.first_key());
      const TilePair pair = this->pair_of(place, first_query, keys);
      const std::uint32_t visible = this->template visible_pairs<false>(pair);
      const std::uint32_t kept = this->template kept_pairs<false>(pair);
      thread_.template wait<1>();
      thread_.sync();
      if (first_row_ < pair.num_queries && !pair.hidden) {
        Pairs s = {};
        this->multiply_rows(s, q_tile(), k_tile(stage), 0);
        this->template take_logits<false>(s, pair, kBias, 0, visible);
        this->take_softmax(s, maximum, sum, out);
        if (p_.dropout.p > 0) {
          BIRKHOFF_UNROLL
          for (int i = 0; i < 32; ++i) s[i / 4][i % 4] *= this->kept(kept, i);
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
  BIRKHOFF_DEVICE std::uint32_t q_tile() const { return kQ + tile_ * Shape::kRowsBytes; }
  static BIRKHOFF_DEVICE std::uint32_t k_tile(int stage) {
    return kKeys + 2 * stage * Shape::kRowsBytes;
  }
  static BIRKHOFF_DEVICE std::uint32_t v_tile(int stage) {
    return kKeys + (2 * stage + 1) * Shape::kRowsBytes;
  }

  // Starts to load the tiles of k and v that come after `keys`, if there are any.
  BIRKHOFF_DEVICE void load_next_keys(KeyTiles<KeySourceParams> keys, const BlockPlace& place,
                                      int stage) const {
    if (keys.next()) this->load_key_rows(k_tile(stage), v_tile(stage), keys, place);
    thread_.commit();
  }

  BIRKHOFF_DEVICE void finish(Columns& out, const float (&maximum)[2], const float (&sum)[2],
                              const BlockPlace& place, int first_query) const {
    if (first_row_ >= this->rows_from(first_query)) return;
    const SinkParams& sinks = p_.sinks;
    const bool has_sink = sinks.data != nullptr;
    const float sink =
        has_sink ? Body::kLog2E * thread_.unpack(sinks.data[place.head * sinks.stride]) : 0;
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
    }
    this->store_rows(out, 1, q_tile(), p_.out, place, first_query);
  }
};

}  // namespace birkhoff
