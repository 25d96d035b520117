// Gradients of gpu_entmax.h, with z computed again from q and k, and the saved thresholds:
//
//   G_ij = sum_d d_out_id v_jd,  m_i = sum_j r_ij G_ij / sum_j r_ij,  ds_ij = r_ij (G_ij - m_i),
//   d_q_id = scale sum_j ds_ij k_jd,  d_k_jd = scale sum_i ds_ij q_id,
//   d_v_jd = sum_i p_ij d_out_id,  d_t_ij = scale ds_ij,
//
// and the gradient of a (Correia et al. 2019, proposition 1), with e_ij = -p_ij log p_ij:
//
//   d_a = sum_i ((sum_j p_ij G_ij / sum_j p_ij - m_i) / (a - 1) +
//                sum_j e_ij G_ij - m_i sum_j e_ij) / (a - 1)
//
// where the division by sum_j p_ij, 1 but for rounding, keeps (a - 1)^2 from magnifying the rest.
//
// EntmaxQueries: a thread block owns a tile of queries and passes twice over the tiles of keys that
// they see, for m (and the query's term of d_a) and for d_q.
//
// EntmaxKeys: a thread block owns a tile of keys and computes d_k and d_v from the tiles of queries
// that see them, with the keys as rows.
//
// A warp owns 16 rows; tiles in which it has no weight cost only the product q k. Shared memory for
// D = 64 and 128: 48 and 96 KiB for queries, 50 and 98 KiB for keys. Products are 16-bit with fp32
// sums; p and ds are rounded to 16 bits between products; everything else is fp32. Each element has
// one owner, which adds in a fixed order: the same bits each time.
#pragma once

#include "attention/kernels/row_normalizer/gpu_entmax.h"

namespace birkhoff {

template <typename Thread, int kHeadDim>
class EntmaxQueries : public RowTilesBody<Thread, kHeadDim, EntmaxParams> {
  using Body = RowTilesBody<Thread, kHeadDim, EntmaxParams>;
  using Pairs = LanePairs<kAtOnce / 8>;
  using Shape = GpuTileShape<kHeadDim>;
  using Body::lane_;
  using Body::p_;
  using Body::thread_;
  using typename Body::Columns;
  using typename Body::OwnQuery;

  // Shared memory: q and d_out; k and v of each stage.
  static constexpr std::uint32_t kQ = 0, kDOut = Shape::kRowsBytes, kStages = 2 * kDOut;

 public:
  static constexpr int kThreadBlocks = kHeadDim == 64 ? 3 : 1;
  static constexpr int kSharedBytes = 3 * kStages;

  using Body::Body;

  // The number of thread blocks.
  static std::int64_t num_tasks(const EntmaxParams& p) { return Body::num_tiles(p, p.queries); }

  BIRKHOFF_DEVICE void run() {
    int first_query;
    const GpuHead head = this->head_of(p_.queries, first_query);
    const EntmaxPower<Thread> power(thread_, p_.excess[head.h]);
    this->load_rows(kQ, p_.q, head, first_query, p_.queries);
    this->load_rows(kDOut, p_.d_out, head, first_query, p_.queries);
    OwnQuery own[2];
    this->find_queries(own, head, first_query);
    const KeyRange hull = this->hull_of(head.b, first_query);
    float threshold[2];
    BIRKHOFF_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int query = this->query_of(first_query, half);
      threshold[half] =
          query < p_.queries ? p_.threshold[this->number_of(head, p_.queries, query)] : kInfinity;
    }
    // Calls use(u, G, first key, k tile, first row in it) for parts of tiles in which the warp has
    // a weight.
    const auto visit = [&](auto use) {
      this->visit_keys(
          hull,
          [&](int first, int stage) {
            this->load_rows(k_tile(stage), p_.k, head, first, p_.keys);
            this->load_rows(v_tile(stage), p_.v, head, first, p_.keys);
          },
          [&](int first, int stage) {
            BIRKHOFF_UNROLL_BY(1)
            for (int j = 0; j < kTileRows; j += kAtOnce) {
              Pairs u = {}, g = {};
              this->multiply_rows(u, kQ, k_tile(stage), j);
              this->take_scores(u, own, first + j, p_.scale * power.excess);
              bool has = false;
              BIRKHOFF_UNROLL
              for (int i = 0; i < kPairs; ++i) {
                u[i / 4][i % 4] = power.above(u[i / 4][i % 4], threshold[i % 4 / 2]);
                has |= u[i / 4][i % 4] != 0;
              }
              if (!thread_.any(has)) continue;
              this->multiply_rows(g, kDOut, v_tile(stage), j);
              use(u, g, first + j, k_tile(stage), j);
            }
          });
    };

    // Of rows lane / 4 and lane / 4 + 8: the sums of r, r G, p, p G, e and e G.
    float sum_r[2] = {}, sum_rg[2] = {}, sum_p[2] = {}, sum_pg[2] = {}, sum_e[2] = {},
          sum_eg[2] = {};
    visit([&](const Pairs& all_u, const Pairs& all_g, int, std::uint32_t, int) {
      BIRKHOFF_UNROLL
      for (int i = 0; i < kPairs; ++i) {
        const int half = i % 4 / 2;
        // G may be NaN where the query has no weight.
        const float u = all_u[i / 4][i % 4], g = u != 0 ? all_g[i / 4][i % 4] : 0,
                    r = power.slope_of(u);
        sum_r[half] += r;
        sum_rg[half] += r * g;
        if (p_.d_alpha == nullptr) continue;
        const float p = u * r, e = power.entropy_of(u, p);
        sum_p[half] += p;
        sum_pg[half] += p * g;
        sum_e[half] += e;
        sum_eg[half] += e * g;
      }
    });
    float mean[2];
    BIRKHOFF_UNROLL
    for (int half = 0; half < 2; ++half) {
      const float total = this->row_sum(sum_r[half]), weighted = this->row_sum(sum_rg[half]);
      mean[half] = total != 0 ? weighted / total : 0;
      const int query = this->query_of(first_query, half);
      const bool writes = lane_ % 4 == 0 && query < p_.queries;
      const std::int64_t at = this->number_of(head, p_.queries, query);
      if (writes) p_.mean[at] = mean[half];
      if (p_.d_alpha == nullptr) continue;
      const float p = this->row_sum(sum_p[half]), pg = this->row_sum(sum_pg[half]),
                  e = this->row_sum(sum_e[half]), eg = this->row_sum(sum_eg[half]);
      if (!writes) continue;
      p_.d_alpha[at] =
          p != 0 ? power.inverse * (power.inverse * (pg / p - mean[half]) + eg - mean[half] * e)
                 : 0;
    }

    Columns d_q = {};
    visit([&](const Pairs& u, Pairs& d_s, int first, std::uint32_t k_tile, int j) {
      BIRKHOFF_UNROLL
      for (int i = 0; i < kPairs; ++i) {
        const float x = u[i / 4][i % 4];
        float& d = d_s[i / 4][i % 4];
        d = x != 0 ? power.slope_of(x) * (d - mean[i % 4 / 2]) : 0;
        if (p_.d_terms != nullptr && x != 0) {
          p_.d_terms[own[i % 4 / 2].term + this->column_of(first, i)] = p_.scale * d;
        }
      }
      this->multiply_columns(d_q, d_s, k_tile, j);
    });
    thread_.sync();
    this->store_rows(d_q, p_.scale, kQ, p_.d_q, head, first_query, p_.queries);  // where q was
  }

 private:
  static constexpr int kPairs = 4 * (kAtOnce / 8);

  static BIRKHOFF_DEVICE std::uint32_t k_tile(int stage) { return kStages * (1 + stage); }
  static BIRKHOFF_DEVICE std::uint32_t v_tile(int stage) {
    return k_tile(stage) + Shape::kRowsBytes;
  }
};

template <typename Thread, int kHeadDim>
class EntmaxKeys : public RowTilesBody<Thread, kHeadDim, EntmaxParams> {
  using Body = RowTilesBody<Thread, kHeadDim, EntmaxParams>;
  // Fewer at once for wide heads, whose results need the registers.
  static constexpr int kQueriesAtOnce = kHeadDim == 64 ? kAtOnce : kAtOnce / 2;
  using Pairs = LanePairs<kQueriesAtOnce / 8>;
  using Shape = GpuTileShape<kHeadDim>;
  using Body::first_row_;
  using Body::lane_;
  using Body::p_;
  using Body::thread_;
  using typename Body::Columns;

  // Shared memory: k and v; q, d_out, and each query's range of keys, threshold and m of each
  // stage.
  static constexpr std::uint32_t kK = 0, kV = Shape::kRowsBytes, kStages = 2 * kV,
                                 kRanges = 2 * Shape::kRowsBytes,
                                 kThresholds = kRanges + 2 * Shape::kNumbersBytes,
                                 kMeans = kThresholds + Shape::kNumbersBytes,
                                 kStageBytes = kMeans + Shape::kNumbersBytes;

 public:
  static constexpr int kThreadBlocks = kHeadDim == 64 ? 2 : 1;
  static constexpr int kSharedBytes = kStages + 2 * kStageBytes;

  using Body::Body;

  // The number of thread blocks.
  static std::int64_t num_tasks(const EntmaxParams& p) { return Body::num_tiles(p, p.keys); }

  BIRKHOFF_DEVICE void run() {
    int first_key;
    const GpuHead head = this->head_of(p_.keys, first_key);
    const EntmaxPower<Thread> power(thread_, p_.excess[head.h]);
    this->load_rows(kK, p_.k, head, first_key, p_.keys);
    this->load_rows(kV, p_.v, head, first_key, p_.keys);
    // The next tile of queries after `now` that sees a key of the own tile.
    const auto next = [&](int now) {
      for (int first = now + kTileRows; first < p_.queries; first += kTileRows) {
        const KeyRange hull = this->hull_of(head.b, first);
        if (hull.first < first_key + kTileRows && hull.end > first_key) return first;
      }
      return -1;
    };
    Columns d_k = {}, d_v = {};
    this->visit_tiles(
        next(-kTileRows), next, [&](int first, int stage) { load_queries(head, first, stage); },
        [&](int first, int stage) {
          const std::uint32_t q_tile = stage_of(stage), d_out_tile = q_tile + Shape::kRowsBytes;
          BIRKHOFF_UNROLL_BY(1)
          for (int i = 0; i < kTileRows; i += kQueriesAtOnce) {
            Pairs p = {}, d_s = {};
            this->multiply_rows(p, kK, q_tile, i);
            if (!take_above(p, power, head, first_key, first, q_tile, i)) continue;
            this->multiply_rows(d_s, kV, d_out_tile, i);
            BIRKHOFF_UNROLL
            for (int n = 0; n < kPairs; ++n) {
              const float mean =
                  thread_.template load_shared<float>(q_tile + kMeans + 4 * this->column_of(i, n));
              const float u = p[n / 4][n % 4], r = power.slope_of(u);
              d_s[n / 4][n % 4] = u != 0 ? r * (d_s[n / 4][n % 4] - mean) : 0;
              p[n / 4][n % 4] = u * r;
            }
            this->multiply_columns(d_v, p, d_out_tile, i);
            this->multiply_columns(d_k, d_s, q_tile, i);
          }
        });
    thread_.sync();
    this->store_rows(d_k, p_.scale, kK, p_.d_k, head, first_key, p_.keys);  // where k and v were
    this->store_rows(d_v, 1, kV, p_.d_v, head, first_key, p_.keys);
  }

 private:
  static constexpr int kPairs = 4 * (kQueriesAtOnce / 8);

  static BIRKHOFF_DEVICE std::uint32_t stage_of(int stage) { return kStages + stage * kStageBytes; }

  BIRKHOFF_DEVICE void load_queries(GpuHead head, int first, int stage) const {
    const std::uint32_t to = stage_of(stage);
    this->load_rows(to, p_.q, head, first, p_.queries);
    this->load_rows(to + Shape::kRowsBytes, p_.d_out, head, first, p_.queries);
    const int row = thread_.index();
    if (row >= kTileRows) return;
    const bool exists = first + row < p_.queries;
    const std::int64_t at = this->number_of(head, p_.queries, exists ? first + row : 0);
    thread_.store_shared(to + kRanges + 8 * row, this->range_of(head.b, first + row));
    thread_.template copy_async<4>(to + kThresholds + 4 * row, p_.threshold + at, exists);
    thread_.template copy_async<4>(to + kMeans + 4 * row, p_.mean + at, exists);
  }

  // Turns products of the own keys with the queries from column `first` on of the tile that begins
  // with first_query into u. Returns whether the warp has a weight there.
  BIRKHOFF_DEVICE bool take_above(Pairs& s, const EntmaxPower<Thread>& power, GpuHead head,
                                  int first_key, int first_query, std::uint32_t q_tile,
                                  int first) const {
    const float factor = p_.scale * power.excess;
    bool has = false;
    BIRKHOFF_UNROLL
    for (int n = 0; n < kPairs; ++n) {
      const int column = this->column_of(first, n),
                key = first_key + first_row_ + place_in_c(lane_, n % 4).row;
      const auto range = thread_.template load_shared<KeyRange>(q_tile + kRanges + 8 * column);
      const auto threshold = thread_.template load_shared<float>(q_tile + kThresholds + 4 * column);
      float& x = s[n / 4][n % 4];
      if (p_.terms != nullptr && range.holds(key)) {
        x += p_.terms[p_.term_of(head, first_query + column, key)];
      }
      x = power.above(range.holds(key) ? x * factor : -kInfinity, threshold);
      has |= x != 0;
    }
    return thread_.any(has);
  }
};

}  // namespace birkhoff
