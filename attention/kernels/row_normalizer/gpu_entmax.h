// Entmax attention of each head with its exponent a (sparsemax is a = 2). Legend: i query, j key, d
// of D.
//
//   z_ij = (a - 1) scale (sum_d q_id k_jd + t_ij),  u_ij = max(z_ij - t_i, 0),
//   r_ij = u_ij^(1 / (a - 1) - 1),  p_ij = u_ij r_ij,  out_id = sum_j p_ij v_jd
//
// over the keys j that i sees. t_ij are terms of distances; t_i is such that the p_ij sum to 1:
// Newton's method from max_j z_ij - 1, where they sum to at least 1. The norm of u_i is a convex
// function of t_i, so that no step from below goes too far. A query that sees no key has out = 0
// and t_i = -infinity.
//
// A thread block owns a tile of queries of a head. It passes over the tiles of keys that they see
// once for the maxima, once for each step of the query that takes the most, and once for `out`, and
// computes z each time: a tile's scores of 4,096 keys would take 1 MiB. A warp owns 16 queries.
// Tiles in which it has no weight cost only the product q k. Shared memory: the tile of q, the
// tiles of k and v in use and those that come next, 40 and 80 KiB for D = 64 and 128. Products are
// 16-bit with fp32 sums, p is rounded to 16 bits for its product, everything else is fp32. Keys
// come in ascending order, and thread blocks share nothing: the same bits each time.
#pragma once

#include "attention/kernels/row_normalizer/gpu_body.h"

namespace birkhoff {

// u, r and p of the pairs of a head.
template <typename Thread>
class EntmaxPower {
 public:
  BIRKHOFF_DEVICE EntmaxPower(const Thread& thread, float a_less_1)
      : excess(a_less_1), inverse(1 / a_less_1), thread_(thread) {}

  const float excess, inverse;  // a - 1 and 1 / (a - 1)

  // u; a score of -infinity is that of a key that is not seen. NaN stays.
  static BIRKHOFF_DEVICE float above(float score, float threshold) {
    const float x = score - threshold;
    return score == -kInfinity || x <= 0 ? 0 : x;
  }
  BIRKHOFF_DEVICE float slope_of(float u) const { return power(u, inverse - 1); }
  // -p log p for p = u^(1 / (a - 1)).
  BIRKHOFF_DEVICE float entropy_of(float u, float p) const {
    constexpr float kLn2 = 0.6931471805599453f;
    return u > kTiny ? -p * kLn2 * inverse * thread_.log2(u) : 0;
  }
  // x^y; 0 and NaN stay.
  BIRKHOFF_DEVICE float power(float x, float y) const {
    return x > kTiny ? thread_.exp2(thread_.log2(x) * y) : x;
  }

 private:
  static constexpr float kTiny = 1e-37f;  // normal numbers are above it

  const Thread& thread_;
};

template <typename Thread, int kHeadDim>
class EntmaxForward : public RowTilesBody<Thread, kHeadDim, EntmaxParams> {
  using Body = RowTilesBody<Thread, kHeadDim, EntmaxParams>;
  using Pairs = LanePairs<kTileRows / 8>;
  using Shape = GpuTileShape<kHeadDim>;
  using Body::lane_;
  using Body::p_;
  using Body::thread_;
  using typename Body::Columns;
  using typename Body::OwnQuery;

  // Shared memory: q; k and v of each stage; a flag of each warp.
  static constexpr std::uint32_t kQ = 0, kStages = Shape::kRowsBytes, kFlags = 5 * kStages;

 public:
  static constexpr int kThreadBlocks = kHeadDim == 64 ? 3 : 2;
  static constexpr int kSharedBytes = kFlags + 4 * Body::kThreads / 32;

  using Body::Body;

  // The number of thread blocks.
  static std::int64_t num_tasks(const EntmaxParams& p) { return Body::num_tiles(p, p.queries); }

  BIRKHOFF_DEVICE void run() {
    int first_query;
    const GpuHead head = this->head_of(p_.queries, first_query);
    const EntmaxPower<Thread> power(thread_, p_.excess[head.h]);
    this->load_rows(kQ, p_.q, head, first_query, p_.queries);
    OwnQuery own[2];
    this->find_queries(own, head, first_query);
    const KeyRange hull = this->hull_of(head.b, first_query);
    // Calls use(s, stage) with the scores of each tile of keys.
    const auto visit = [&](bool with_values, auto use) {
      this->visit_keys(
          hull,
          [&](int first, int stage) {
            this->load_rows(k_tile(stage), p_.k, head, first, p_.keys);
            if (with_values) this->load_rows(v_tile(stage), p_.v, head, first, p_.keys);
          },
          [&](int first, int stage) {
            Pairs s = {};
            this->multiply_rows(s, kQ, k_tile(stage), 0);
            this->take_scores(s, own, first, p_.scale * power.excess);
            use(s, stage);
          });
    };

    // Of rows lane / 4 and lane / 4 + 8.
    float threshold[2] = {-kInfinity, -kInfinity};
    visit(false, [&](const Pairs& s, int) {
      BIRKHOFF_UNROLL
      for (int i = 0; i < kPairs; ++i) larger(s[i / 4][i % 4], threshold[i % 4 / 2]);
    });
    BIRKHOFF_UNROLL
    for (int half = 0; half < 2; ++half) {
      larger(thread_.exchange(threshold[half], 1), threshold[half]);
      larger(thread_.exchange(threshold[half], 2), threshold[half]);
      threshold[half] -= 1;
    }
    bool moves[2] = {true, true};  // a query that has arrived stays: it depends on no other
    for (int iteration = 0; iteration < kMaxIterations; ++iteration) {
      float sum[2] = {0, 0}, slope[2] = {0, 0};
      visit(false, [&](const Pairs& s, int) {
        if (!has_weight(s, threshold)) return;
        BIRKHOFF_UNROLL
        for (int i = 0; i < kPairs; ++i) {
          const float u = power.above(s[i / 4][i % 4], threshold[i % 4 / 2]), r = power.slope_of(u);
          sum[i % 4 / 2] += u * r;
          slope[i % 4 / 2] += r;
        }
      });
      BIRKHOFF_UNROLL
      for (int half = 0; half < 2; ++half) {
        float& t = threshold[half];
        const float total = this->row_sum(sum[half]), slopes = this->row_sum(slope[half]),
                    step = (power.power(total, power.excess) - 1) /
                           (slopes * power.power(total, power.excess - 1));
        moves[half] = moves[half] && slopes > 0 && step > kEnough * (1 + (t > 0 ? t : -t));
        if (moves[half]) t += step;
      }
      if (!any_of_block(moves[0] || moves[1])) break;
    }

    Columns out = {};
    visit(true, [&](Pairs& s, int stage) {
      if (!has_weight(s, threshold)) return;
      BIRKHOFF_UNROLL
      for (int i = 0; i < kPairs; ++i) {
        const float u = power.above(s[i / 4][i % 4], threshold[i % 4 / 2]);
        s[i / 4][i % 4] = u * power.slope_of(u);
      }
      this->multiply_columns(out, s, v_tile(stage), 0);
    });
    BIRKHOFF_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int query = this->query_of(first_query, half);
      if (lane_ % 4 == 0 && query < p_.queries) {
        p_.threshold[this->number_of(head, p_.queries, query)] = threshold[half];
      }
    }
    thread_.sync();
    this->store_rows(out, 1, kQ, p_.out, head, first_query, p_.queries);  // where q was
  }

 private:
  static constexpr int kPairs = 4 * (kTileRows / 8), kMaxIterations = 40;
  static constexpr float kEnough = 1e-7f;

  static BIRKHOFF_DEVICE std::uint32_t k_tile(int stage) {
    return kStages + 2 * stage * Shape::kRowsBytes;
  }
  static BIRKHOFF_DEVICE std::uint32_t v_tile(int stage) {
    return k_tile(stage) + Shape::kRowsBytes;
  }

  // NaN is the largest.
  static BIRKHOFF_DEVICE void larger(float x, float& most) { most = x > most || x != x ? x : most; }

  // Whether a key of the tile has a weight in one of the warp's rows.
  BIRKHOFF_DEVICE bool has_weight(const Pairs& s, const float (&threshold)[2]) const {
    bool has = false;
    BIRKHOFF_UNROLL
    for (int i = 0; i < kPairs; ++i) has |= !(s[i / 4][i % 4] <= threshold[i % 4 / 2]);
    return thread_.any(has);
  }

  BIRKHOFF_DEVICE bool any_of_block(bool x) const {
    const bool of_warp = thread_.any(x);
    if (lane_ == 0) thread_.store_shared(kFlags + 4 * (thread_.index() / 32), of_warp ? 1 : 0);
    thread_.sync();
    bool any = false;
    for (int warp = 0; warp < Body::kThreads / 32; ++warp) {
      any |= thread_.template load_shared<int>(kFlags + 4 * warp) != 0;
    }
    return any;
  }
};

}  // namespace birkhoff
