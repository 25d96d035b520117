// Gradients of gpu_forward.h, with p recomputed from m and z. Legend as there.
//
//   delta_i = sum_d d_out_id out_id,  d_p_ij = M_ij (sum_d d_out_id v_jd + u_ij),
//   d_s_ij = p_ij (d_p_ij - delta_i),  d_bias_j = sum_i d_s_ij,
//   d_q_id = scale sum_j d_s_ij k_jd,  d_k_jd = scale sum_i d_s_ij q_id,
//   d_v_jd = sum_i p_ij M_ij d_out_id.
//
// u_ij is the term of j's distance (DistanceParams::of_values), if values have relative positions.
//
// kValues: whether values have relative positions; then no kernel owns keys and queries.
//
// BlockAttentionBackwardQueries: a thread block owns kTiles tiles of queries of one head and
// computes their d_q and delta. If no other queries see its keys (BlockAttentionParams::owns_keys:
// blocks of at most 64, and of at most 128 with two tiles, as in Sinkhorn attention and block-local
// attention without neighbors), it also computes d_k, d_v and d_bias of each tile of keys, with p
// and d_s of all its queries in shared memory; a warp then owns 16 keys. With two tiles of queries,
// the warps of the first compute d_k and those of the second d_v. Otherwise
// BlockAttentionBackwardKeys computes the keys' gradients, with delta. With relative positions it
// also adds up d_s, and p_ij M_ij if values have them, for each row of the table; gpu_terms.h does
// the rest. kStages tiles of k and v are in flight; one where there is only one.
//
// BlockAttentionBackwardKeys: a thread block owns a tile of keys of one key head and computes their
// gradients from all tiles of queries that see them, query head by query head, with the keys as
// rows of p; a warp owns 16 keys.
//
// For D > 128 two warps share rows, each with half of the columns. Shared memory, for D = 64, 128
// and 256: 65, 113 and 145 KiB for queries that own their keys (49 and 81 with one stage; 98 and
// 162 for two tiles), 49, 97 and 129 KiB for other queries, 50, 98 and 129 KiB for keys. Products
// are 16-bit with fp32 sums; p and d_s are rounded to 16 bits between products; the rest is fp32.
// Each element has one owner, which adds in a fixed order: no atomics, the same bits each time.
#pragma once

#include "attention/kernels/block_attention/gpu_body.h"

namespace birkhoff {

template <typename Thread, int kHeadDim, int kTiles, bool kOwnsKeys, int kStages,
          bool kValues = false>
class BlockAttentionBackwardQueries : public BlockAttentionBody<Thread, kHeadDim, kTiles> {
  using Body = BlockAttentionBody<Thread, kHeadDim, kTiles>;
  using typename Body::Columns;
  using Pairs = LanePairs<kAtOnce / 8>;
  using Shape = GpuTileShape<kHeadDim>;
  using Body::first_column_;
  using Body::first_row_;
  using Body::lane_;
  using Body::p_;
  using Body::thread_;
  using Body::tile_;

  // Whether all tiles that fit load before delta is computed, with d_out from its tile. Otherwise
  // delta reads d_out from memory (the L2 cache), and loads are spread over the work.
  static constexpr bool kLoadsFirst = kHeadDim <= 128 && (kTiles > 1 || kStages == 1);
  static constexpr bool kOneTile = kLoadsFirst && kStages == 1;  // of keys
  static constexpr int kTilesBytes = kTiles * Shape::kRowsBytes,
                       kProbabilitiesBytes = kOwnsKeys ? kTiles * Shape::kPairsBytes : 0,
                       kStatisticsBytes = kTiles * Shape::kNumbersBytes;
  static constexpr std::uint32_t kQ = 0, kDOut = kTilesBytes, kKeys = kDOut + kTilesBytes,
                                 kP = kKeys + 2 * kStages * Shape::kRowsBytes,
                                 kDS = kP + kProbabilitiesBytes, kBias = kDS + kProbabilitiesBytes,
                                 kMaximum = kBias + Shape::kNumbersBytes,
                                 kInverseSum = kMaximum + kStatisticsBytes,
                                 kDelta = kInverseSum + kStatisticsBytes;

 public:
  static constexpr int kThreadBlocks = kHeadDim > 64             ? 1
                                       : kStages == 1            ? 4
                                       : kTiles == 1 && !kValues ? 3
                                                                 : 2;
  static constexpr int kSharedBytes = kDelta + Shape::kWarpsOfRow * kStatisticsBytes;
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
    const int num_queries = this->rows_from(first_query);
    this->find_noise(place.batch);

    this->load_rows(q_tile(), p_.q, place, first_query);
    this->load_rows(d_out_tile(), p_.d_out, place, first_query);
    this->load_numbers(statistics(kMaximum), p_.max, place, first_query);
    this->load_numbers(statistics(kInverseSum), p_.inverse_sum, place, first_query);
    if (kLoadsFirst) thread_.commit();
    KeyTiles<KeySourceParams> keys = this->keys_of(place, first_query);
    BIRKHOFF_UNROLL
    for (int stage = 0; stage < (kLoadsFirst ? kStages : 1); ++stage) {
      load_keys(keys, stage + 1, place, stage);
    }
    thread_.sync_warp();  // without it the assembler delays the copies past the code below
    make_delta(place, first_query);

    Columns d_q = {};
    for (int stage = 0; keys.next(); stage = (stage + 1) % kStages) {
      if (!kLoadsFirst && kStages == 2) load_keys(keys, 1, place, stage ^ 1);
      // Work that needs no tile, while the tiles load.
      this->load_bias(kBias, p_.sources[keys.source()].bias, this->key_place(place),
                      keys.first_key());
      const TilePair pair = this->pair_of(place, first_query, keys);
      const std::uint32_t visible = this->template visible_pairs<false>(pair);
      const std::uint32_t kept = this->template kept_pairs<false>(pair);
      thread_.template wait<kStages - 1>();
      thread_.sync();
      BIRKHOFF_UNROLL_BY(1)
      for (int first = 0; first < pair.num_keys; first += kAtOnce) {
        Pairs p = {}, d_s = {};
        const bool hidden = pair.hidden || (pair.diagonal && first_row_ + 15 < first);
        if (first_row_ < num_queries && !hidden) {
          this->multiply_rows(p, q_tile(), k_tile(stage), first);
          this->template take_logits<false>(p, pair, kBias, first, visible);
          this->multiply_rows(d_s, d_out_tile(), v_tile(stage), first);
          if constexpr (kValues) this->template add_value_terms<false>(d_s, pair, first, visible);
          take_gradient(p, d_s, kept >> first / 2);
          if (pair.distances != nullptr && first_column_ == 0) {
            add_up(d_s, p_.distances.d_s, pair, first);
            if constexpr (kValues) add_up(p, p_.distances.p, pair, first);
          }
          this->multiply_columns(d_q, d_s, k_tile(stage), first);
        }
        if (kOwnsKeys && first_column_ == 0) {
          store_pairs(kP, p, first);
          store_pairs(kDS, d_s, first);
        }
      }
      if constexpr (kOwnsKeys) {
        thread_.sync();
        if (first_row_ < pair.num_keys) {
          store_key_gradients(p_.sources[keys.source()], place, keys.first_key(), stage);
        }
      }
      if (kOneTile) break;
      thread_.sync();  // the tiles have been read
      if (kLoadsFirst || kStages == 1) load_keys(keys, kStages, place, stage);
    }
    thread_.template wait<0>();
    thread_.sync();
    const int row = this->index_in_tile();
    if (row < num_queries) {
      p_.delta[this->query_number(place, first_query) + row] = delta_of(row);
    }
    if (first_row_ < num_queries) {
      this->store_rows(d_q, p_.scale, q_tile(), p_.d_q, place, first_query);
    }
  }

 private:
  // The tiles and statistics of this thread's queries.
  BIRKHOFF_DEVICE std::uint32_t q_tile() const { return kQ + tile_ * Shape::kRowsBytes; }
  BIRKHOFF_DEVICE std::uint32_t d_out_tile() const { return kDOut + tile_ * Shape::kRowsBytes; }
  BIRKHOFF_DEVICE std::uint32_t statistics(std::uint32_t of_tiles) const {
    return of_tiles + tile_ * Shape::kNumbersBytes;
  }
  static BIRKHOFF_DEVICE std::uint32_t k_tile(int stage) {
    return kKeys + 2 * stage * Shape::kRowsBytes;
  }
  static BIRKHOFF_DEVICE std::uint32_t v_tile(int stage) {
    return kKeys + (2 * stage + 1) * Shape::kRowsBytes;
  }

  // Starts to load the tiles of k and v that come `ahead` tiles after `keys`, if there are any.
  BIRKHOFF_DEVICE void load_keys(KeyTiles<KeySourceParams> keys, int ahead, BlockPlace place,
                                 int stage) const {
    bool exists = true;
    BIRKHOFF_UNROLL
    for (int i = 0; i < ahead; ++i) exists = keys.next();
    if (exists) this->load_key_rows(k_tile(stage), v_tile(stage), keys, place);
    thread_.commit();
  }

  // Four lanes sum the columns of a row that the warp owns. All loads are issued before the first
  // is used, so that the warp waits for memory only once.
  BIRKHOFF_DEVICE void make_delta(const BlockPlace& place, int first_query) const {
    constexpr int kSteps = Shape::kWarpColumns / 32;
    const int row = first_row_ + lane_ / 4, column = first_column_ + lane_ % 4 * 8;
    const std::uint16_t* from = Body::first_of(p_.out, place, first_query + row) + column;
    const std::uint16_t* from_d_out = Body::first_of(p_.d_out, place, first_query + row) + column;
    Words out[2][kSteps], d_out[2][kSteps];
    BIRKHOFF_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int count = row + 8 * half < this->rows_from(first_query) ? p_.head_dim : 0;
      BIRKHOFF_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        out[half][step] = d_out[half][step] = {};
        if (column + 32 * step >= count) continue;
        out[half][step] = *reinterpret_cast<const Words*>(from + 32 * step);
        if (kLoadsFirst) continue;
        d_out[half][step] = *reinterpret_cast<const Words*>(from_d_out + 32 * step);
      }
      from += 8 * p_.out.strides[3];
      from_d_out += 8 * p_.d_out.strides[3];
    }
    if (kLoadsFirst) {
      thread_.template wait<kStages>();  // d_out is there, the first keys may not be
      thread_.sync();
    }
    const std::uint32_t d_out_row = d_out_tile() + place_in_tile<kHeadDim>(row, column);
    BIRKHOFF_UNROLL
    for (int half = 0; half < 2; ++half) {
      float delta = 0;
      BIRKHOFF_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        if (kLoadsFirst) {
          d_out[half][step] = thread_.template load_shared<Words>(
              further_right(d_out_row, 32 * step) + 2 * 8 * half * kHeadDim);
        }
        BIRKHOFF_UNROLL
        for (int k = 0; k < 8; ++k) {
          const int shift = k % 2 * 16;
          delta +=
              thread_.unpack(static_cast<std::uint16_t>(out[half][step].words[k / 2] >> shift)) *
              thread_.unpack(static_cast<std::uint16_t>(d_out[half][step].words[k / 2] >> shift));
        }
      }
      delta = this->row_sum(delta);
      if (lane_ % 4 != 0) continue;
      thread_.store_shared(
          delta_part(first_row_ + lane_ / 4 + 8 * half, first_column_ / Shape::kWarpColumns),
          delta);
    }
  }

  // The address of one part of a row's delta: the sum over the columns that one warp owns.
  BIRKHOFF_DEVICE std::uint32_t delta_part(int row, int part) const {
    return statistics(kDelta) + part * kStatisticsBytes + 4 * row;
  }
  BIRKHOFF_DEVICE float delta_of(int row) const {
    float delta = thread_.template load_shared<float>(delta_part(row, 0));
    BIRKHOFF_UNROLL
    for (int part = 1; part < Shape::kWarpsOfRow; ++part) {
      delta += thread_.template load_shared<float>(delta_part(row, part));
    }
    return delta;
  }

  // Turns logits into the factors of d_out in d_v, and products d_out . v into d_s.
  BIRKHOFF_DEVICE void take_gradient(Pairs& p, Pairs& d_s, std::uint32_t kept) const {
    const bool drops = p_.dropout.p > 0;
    BIRKHOFF_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = first_row_ + lane_ / 4 + 8 * half;
      const float maximum = thread_.template load_shared<float>(statistics(kMaximum) + 4 * row);
      const float inverse_sum =
          thread_.template load_shared<float>(statistics(kInverseSum) + 4 * row);
      const float delta = delta_of(row);
      BIRKHOFF_UNROLL
      for (int j = 0; j < kAtOnce / 8; ++j) {
        BIRKHOFF_UNROLL
        for (int r = 2 * half; r < 2 * half + 2; ++r) {
          const float share = thread_.exp2(p[j][r] - maximum) * inverse_sum;
          const float factor = drops ? this->kept(kept, 4 * j + r) : 1;
          d_s[j][r] = share * (d_s[j][r] * factor - delta);
          p[j][r] = share * factor;
        }
      }
    }
  }

  // Adds pairs to the sums of their distances.
  BIRKHOFF_DEVICE void add_up(const Pairs& x, float* sums, const TilePair& pair,
                              int first_column) const {
    BIRKHOFF_UNROLL
    for (int half = 0; half < 2; ++half) {
      this->join_by_distance(x, half, this->numbers_of(pair, sums), 0, pair, first_column,
                             [](float sum, float value) { return sum + value; });
    }
  }

  BIRKHOFF_DEVICE void store_pairs(std::uint32_t tile, const Pairs& c, int first) const {
    const Place place = place_in_c(lane_, 0);
    tile += tile_ * Shape::kPairsBytes +
            place_in_tile<kTileRows>(first_row_ + place.row, first + place.column);
    BIRKHOFF_UNROLL
    for (int j = 0; j < kAtOnce / 8; ++j) {
      thread_.store_shared(further_right(tile, 8 * j), thread_.pack(c[j][0], c[j][1]));
      thread_.store_shared(further_right(tile, 8 * j) + 2 * 8 * kTileRows,
                           thread_.pack(c[j][2], c[j][3]));
    }
  }

  // Loads columns [first_row_, first_row_ + 16) of rows [first_i, first_i + 16) of pairs of all
  // tiles, transposed.
  BIRKHOFF_DEVICE void load_transposed(std::uint32_t (&a)[4], std::uint32_t pairs,
                                       int first_i) const {
    const Place right = rightwards(lane_);
    pairs += place_in_tile<kTileRows>(right.row, first_row_ + right.column);
    thread_.template load_matrices<true>(a, pairs + 2 * first_i * kTileRows);
  }

  static constexpr int kUnrolled = kTiles == 1 ? 4 : 1;  // more would spill registers

  // Stores gradients of the warp's 16 keys from first_key + first_row_ on: the warps of the last
  // tile store v's, the warps of the first tile k's and the bias's. They pass through the tiles
  // that held the keys: all warps have finished with these tiles.
  BIRKHOFF_DEVICE void store_key_gradients(const KeySourceParams& source, const BlockPlace& place,
                                           int first_key, int stage) const {
    const int first_i = kTiles > 1 && source.window.causal ? first_key : 0;
    if (tile_ == kTiles - 1) {
      Columns d_v = {};
      BIRKHOFF_UNROLL_BY(kUnrolled)
      for (int i = first_i; i < Body::kRows; i += 16) {
        std::uint32_t a[4];
        load_transposed(a, kP, i);
        this->multiply_columns(d_v, a, kDOut, i);
      }
      this->store_rows(d_v, 1, v_tile(stage), source.d_v, place, first_key);
    }
    if (tile_ != 0) return;
    const std::uint32_t ones = thread_.pack(1, 1);
    Columns d_k = {};
    float d_bias[4] = {};
    BIRKHOFF_UNROLL_BY(kUnrolled)
    for (int i = first_i; i < Body::kRows; i += 16) {
      std::uint32_t a[4];
      load_transposed(a, kDS, i);
      this->multiply_columns(d_k, a, kQ, i);
      if (source.bias.data != nullptr) thread_.multiply(d_bias, a, ones, ones);
    }
    this->store_rows(d_k, p_.scale, k_tile(stage), source.d_k, place, first_key);
    if (source.bias.data == nullptr || first_column_ != 0 || lane_ % 4 != 0) return;
    for (int half = 0; half < 2; ++half) {
      const int row = first_key + first_row_ + lane_ / 4 + 8 * half;
      if (row < p_.block) source.bias.gradient[this->key_number(place, row)] = d_bias[2 * half];
    }
  }
};

template <typename Thread, int kHeadDim, bool kValues>
class BlockAttentionBackwardKeys : public BlockAttentionBody<Thread, kHeadDim, 1> {
  using Body = BlockAttentionBody<Thread, kHeadDim, 1>;
  using typename Body::Columns;
  // Fewer at once for wide heads with more terms, which need the registers.
  static constexpr int kQueriesAtOnce = kHeadDim > 64 && kValues ? kAtOnce / 2 : kAtOnce;
  using Pairs = LanePairs<kQueriesAtOnce / 8>;
  using Shape = GpuTileShape<kHeadDim>;
  using Body::first_column_;
  using Body::first_row_;
  using Body::lane_;
  using Body::p_;
  using Body::thread_;

  static constexpr int kStages = Shape::kBackwardStages;
  static constexpr std::uint32_t kK = 0, kV = Shape::kRowsBytes, kQueries = 2 * Shape::kRowsBytes,
                                 kStageBytes = 2 * Shape::kRowsBytes + 3 * Shape::kNumbersBytes,
                                 kBias = kQueries + kStages * kStageBytes;

 public:
  static constexpr int kThreadBlocks = 1;
  static constexpr int kSharedBytes = kBias + Shape::kNumbersBytes;
  static_assert(kSharedBytes <= Shape::kMaxBytes);

  using Body::Body;

  // The number of thread blocks.
  static std::int64_t num_tasks(const BlockAttentionParams& p) {
    return p.num_sources * Body::num_parts(p, p.key_heads());
  }

  BIRKHOFF_DEVICE void run() {
    const unsigned tiles_of_source = static_cast<unsigned>(Body::num_parts(p_, p_.key_heads())),
                   task = static_cast<unsigned>(thread_.block());
    const int source_index = static_cast<int>(task / tiles_of_source);
    const KeySourceParams& source = p_.sources[source_index];
    int first_key;
    const BlockPlace place =
        this->place_of(task % tiles_of_source, p_.key_heads(), first_key);  // of the keys
    const int num_keys = this->rows_from(first_key);
    this->find_noise(place.batch);

    this->load_rows(kK, source.k, place, first_key);
    this->load_rows(kV, source.v, place, first_key);
    QueryTiles queries(source.window, p_.group, p_.blocks, p_.block, place.n, first_key);
    bool more = queries.next();
    if (more) load_queries(queries, place, 0);
    thread_.commit();
    this->load_bias(kBias, source.bias, place, first_key);

    Columns d_k = {}, d_v = {};
    float d_bias[2] = {};  // of rows lane / 4 and lane / 4 + 8, over this lane's columns
    for (int stage = 0; more; stage = (stage + 1) % kStages) {
      const QueryTiles now = queries;
      more = queries.next();
      if (more && kStages == 2) load_queries(queries, place, stage ^ 1);
      thread_.commit();
      // Work that needs no tile, while the tiles load.
      const TilePair pair = this->pair_of(query_place(now, place), now.first_query(), source_index,
                                          now.offset(), first_key);
      const std::uint32_t visible = this->template visible_pairs<true>(pair);
      const std::uint32_t kept = this->template kept_pairs<true>(pair);
      thread_.template wait<kStages - 1>();
      thread_.sync();
      if (first_row_ < num_keys) {
        const std::uint32_t q_tile = kQueries + stage * kStageBytes,
                            d_out_tile = q_tile + Shape::kRowsBytes;
        BIRKHOFF_UNROLL_BY(1)
        for (int first = 0; first < pair.num_queries; first += kQueriesAtOnce) {
          if (pair.diagonal && first + kQueriesAtOnce - 1 < first_row_) continue;  // hidden
          Pairs p = {}, d_s = {};
          this->multiply_rows(p, kK, q_tile, first);
          this->template take_logits<true>(p, pair, kBias, first, visible);
          this->multiply_rows(d_s, kV, d_out_tile, first);
          if constexpr (kValues) this->template add_value_terms<true>(d_s, pair, first, visible);
          this->take_gradient(p, d_s, d_out_tile + Shape::kRowsBytes + 4 * first, 1, [&](int i) {
            return p_.dropout.p > 0 ? this->kept(kept >> first / 2, i) : 1;
          });
          if (source.bias.data != nullptr) {
            BIRKHOFF_UNROLL
            for (int i = 0; i < 4 * (kQueriesAtOnce / 8); ++i)
              d_bias[i % 4 / 2] += d_s[i / 4][i % 4];
          }
          this->multiply_columns(d_v, p, d_out_tile, first);
          this->multiply_columns(d_k, d_s, q_tile, first);
        }
      }
      thread_.sync();  // the tiles have been read
      if (more && kStages == 1) load_queries(queries, place, 0);
    }
    thread_.template wait<0>();
    thread_.sync();
    if (first_row_ >= num_keys) return;
    this->store_rows(d_k, p_.scale, kK, source.d_k, place, first_key);
    this->store_rows(d_v, 1, kV, source.d_v, place, first_key);
    if (source.bias.data == nullptr) return;
    for (int half = 0; half < 2; ++half) {
      const int row = first_row_ + lane_ / 4 + 8 * half;
      const float total = this->row_sum(d_bias[half]);
      if (first_column_ == 0 && lane_ % 4 == 0 && row < num_keys) {
        source.bias.gradient[this->key_number(place, first_key) + row] = total;
      }
    }
  }

 private:
  BIRKHOFF_DEVICE BlockPlace query_place(const QueryTiles& queries, const BlockPlace& keys) const {
    return {keys.batch, keys.head * p_.group + queries.head(), queries.n()};
  }

  // Loads q and d_out, then maximum, inverse sum and delta of each query; zeros for queries that do
  // not exist.
  BIRKHOFF_DEVICE void load_queries(const QueryTiles& queries, const BlockPlace& keys,
                                    int stage) const {
    const std::uint32_t tile = kQueries + stage * kStageBytes;
    const BlockPlace place = query_place(queries, keys);
    const int first_query = queries.first_query();
    this->load_rows(tile, p_.q, place, first_query);
    this->load_rows(tile + Shape::kRowsBytes, p_.d_out, place, first_query);
    const std::uint32_t numbers = tile + 2 * Shape::kRowsBytes;
    this->load_numbers(numbers, p_.max, place, first_query);
    this->load_numbers(numbers + Shape::kNumbersBytes, p_.inverse_sum, place, first_query);
    this->load_numbers(numbers + 2 * Shape::kNumbersBytes, p_.delta, place, first_query);
  }
};

}  // namespace birkhoff
