// Gradients of gpu_forward.h. cpu_sinkformer.h has the formulas. Here each half-step t has
// coefficients x^t: delta for t = T, d_f^t for other odd t, and m / n d_g^t for even t. So
//   d_S_ij = P_ij G_ij - sum_t exp(S_ij + potentials of t and t - 1) x^t,  t <= T,
// where x^t is that of i for odd t and of j for even t. delta is the sum of P G, not d_out . out:
// with rounded outputs the terms of d_S would not cancel.
//
// SinkformerStart: x^T in one launch, x^(T-1) and d_v in another. SinkformerUnroll: x^t from
// x^(t+1), for t = T - 2 to 1. SinkformerGradient: d_q or d_k, which have the same formula with the
// sides exchanged. Thread blocks own 64 rows of a side, pass over all rows of the other side and
// compute the products again.
//
// A warp owns 16 rows. Shared memory holds the own rows and values and, for the tile in use and the
// next one, those of the other side: 49 and 97 KiB for D = 64 and 128, 25 and 49 for
// SinkformerUnroll. Products are 16-bit with fp32 sums; P and d_S are rounded to 16 bits between
// products; the rest is fp32. Each value has one owner, which adds in a fixed order: the same bits
// each time.
#pragma once

#include "attention/kernels/sinkformer/gpu_body.h"

namespace birkhoff {

// Owns queries if p_.step = T, keys if p_.step = T - 1.
template <typename Thread, int kHeadDim>
class SinkformerStart : public SinkformerBody<Thread, kHeadDim> {
  using Body = SinkformerBody<Thread, kHeadDim>;
  using Shape = GpuTileShape<kHeadDim>;
  static constexpr int kGroups = kAtOnce / 8;
  using Pairs = LanePairs<kGroups>;
  using Body::p_;
  using Body::thread_;
  using typename Body::Columns;
  using typename Body::OwnRows;

  static constexpr std::uint32_t kRows = 0, kValues = Shape::kRowsBytes, kStages = 2 * kValues;

 public:
  static constexpr int kThreadBlocks = kHeadDim == 64 ? 3 : 1;
  static constexpr int kSharedBytes = kStages + 2 * Body::kStageBytes;

  using Body::Body;

  BIRKHOFF_DEVICE void run() {
    if (this->num_rows_ <= 0) return;
    this->load_own(kRows, this->own_.rows);
    this->load_own(kValues, this->own_.values);
    OwnRows own, own_values;
    const auto potentials =
        this->template load_sums<kGroups>(this->own_potentials(p_.half_steps), nullptr);
    const bool of_keys = p_.step % 2 == 0,
               has_coefficients = !of_keys || (p_.unrolled && p_.step > 0);
    Columns d_v = {};
    float total[2] = {0, 0};  // of rows lane / 4 and lane / 4 + 8, over this lane's columns
    this->template visit_tiles<Body::kStageBytes>(
        kStages,
        [&](std::uint32_t stage, int first) {
          this->load_other(Body::rows_of(stage), this->other_.rows, first);
          this->load_other(Body::values_of(stage), this->other_.values, first);
          this->load_numbers(Body::numbers_of(stage, 0),
                             this->other_potentials(p_.half_steps, first));
          this->load_numbers(Body::numbers_of(stage, 1),
                             this->other_coefficients(p_.half_steps, first));
        },
        [&](std::uint32_t stage, int first) {
          if (first == 0) {
            this->load_own_rows(own, kRows);
            this->load_own_rows(own_values, kValues);
          }
          BIRKHOFF_UNROLL_BY(1)
          for (int at = 0; at < kTileRows && first + at < this->other_length_; at += kAtOnce) {
            Pairs p = {};
            this->multiply_rows(p, own, Body::rows_of(stage), at);
            this->take_logits(p, Body::numbers_of(stage, 0) + 4 * at, first + at);
            BIRKHOFF_UNROLL
            for (int i = 0; i < 4 * kGroups; ++i) {
              p[i / 4][i % 4] = thread_.exp2(p[i / 4][i % 4] + potentials.at(i / 4, i % 4));
            }
            if (has_coefficients) {
              Pairs g = {};
              this->multiply_rows(g, own_values, Body::values_of(stage), at);
              add_gradient(p, g, Body::numbers_of(stage, 1) + 4 * at, total);
            }
            if (of_keys) this->multiply_columns(d_v, p, Body::values_of(stage), at);
          }
        });
    if (of_keys) this->store_own(d_v, 1, kValues, p_.d_v);
    if (!has_coefficients) return;
    const float factor = of_keys ? 1 / this->mass() : 1;
    BIRKHOFF_UNROLL
    for (int half = 0; half < 2; ++half) total[half] = factor * this->row_sum(total[half]);
    this->store_values(this->own_coefficients(p_.step), total);
  }

 private:
  // Adds p (g - delta), with 0 for delta where it is to be computed.
  BIRKHOFF_DEVICE void add_gradient(const Pairs& p, const Pairs& g, std::uint32_t deltas,
                                    float (&total)[2]) const {
    BIRKHOFF_UNROLL
    for (int j = 0; j < kGroups; ++j) {
      const TwoColumns delta = this->of_columns(deltas, j);
      BIRKHOFF_UNROLL
      for (int r = 0; r < 4; ++r) total[r / 2] += p[j][r] * (g[j][r] - delta.of[r % 2]);
    }
  }
};

template <typename Thread, int kHeadDim>
class SinkformerUnroll : public SinkformerBody<Thread, kHeadDim> {
  using Body = SinkformerBody<Thread, kHeadDim>;
  static constexpr int kGroups = kTileRows / 8;
  using Pairs = LanePairs<kGroups>;
  using Body::p_;
  using Body::thread_;
  using typename Body::OwnRows;

  static constexpr std::uint32_t kOwn = 0, kStages = GpuTileShape<kHeadDim>::kRowsBytes;

 public:
  static constexpr int kThreadBlocks = kHeadDim == 64 ? 5 : 3;
  static constexpr int kSharedBytes = kStages + 2 * Body::kRowsStageBytes;

  using Body::Body;

  BIRKHOFF_DEVICE void run() {
    if (this->num_rows_ <= 0) return;
    this->load_own(kOwn, this->own_.rows);
    OwnRows own;
    const int next = p_.step + 1;
    const auto potentials = this->template load_sums<kGroups>(this->own_potentials(next), nullptr);
    float total[2] = {0, 0};  // of rows lane / 4 and lane / 4 + 8, over this lane's columns
    this->template visit_tiles<Body::kRowsStageBytes>(
        kStages,
        [&](std::uint32_t stage, int first) {
          this->load_other(Body::rows_of(stage), this->other_.rows, first);
          this->load_numbers(Body::numbers_of(stage, 0), this->other_potentials(next, first));
          this->load_numbers(Body::numbers_of(stage, 1), this->other_coefficients(next, first));
        },
        [&](std::uint32_t stage, int first) {
          if (first == 0) this->load_own_rows(own, kOwn);
          Pairs s = {};
          this->multiply_rows(s, own, Body::rows_of(stage), 0);
          this->take_logits(s, Body::numbers_of(stage, 0), first);
          BIRKHOFF_UNROLL
          for (int j = 0; j < kGroups; ++j) {
            const TwoColumns x = this->of_columns(Body::numbers_of(stage, 1), j);
            BIRKHOFF_UNROLL
            for (int r = 0; r < 4; ++r) {
              total[r / 2] += thread_.exp2(s[j][r] + potentials.at(j, r)) * x.of[r % 2];
            }
          }
        });
    const float factor = p_.step % 2 == 1 ? -1 : -1 / this->mass();
    BIRKHOFF_UNROLL
    for (int half = 0; half < 2; ++half) total[half] = factor * this->row_sum(total[half]);
    this->store_values(this->own_coefficients(p_.step), total);
  }
};

// Owns queries or keys: p_.step = 1 or 2.
template <typename Thread, int kHeadDim>
class SinkformerGradient : public SinkformerBody<Thread, kHeadDim> {
  using Body = SinkformerBody<Thread, kHeadDim>;
  using Shape = GpuTileShape<kHeadDim>;
  static constexpr int kGroups = kAtOnce / 8;
  using Pairs = LanePairs<kGroups>;
  using Body::p_;
  using Body::thread_;
  using typename Body::Columns;
  using typename Body::OwnRows;

  static constexpr std::uint32_t kRows = 0, kValues = Shape::kRowsBytes, kStages = 2 * kValues;

 public:
  static constexpr int kThreadBlocks = kHeadDim == 64 ? 3 : 1;
  static constexpr int kSharedBytes = kStages + 2 * Body::kStageBytes;

  using Body::Body;

  BIRKHOFF_DEVICE void run() {
    if (this->num_rows_ <= 0) return;
    this->load_own(kRows, this->own_.rows);
    this->load_own(kValues, this->own_.values);
    OwnRows own, own_values;
    Columns d_rows = {};
    this->template visit_tiles<Body::kStageBytes>(
        kStages,
        [&](std::uint32_t stage, int first) {
          this->load_other(Body::rows_of(stage), this->other_.rows, first);
          this->load_other(Body::values_of(stage), this->other_.values, first);
        },
        [&](std::uint32_t stage, int first) {
          if (first == 0) {
            this->load_own_rows(own, kRows);
            this->load_own_rows(own_values, kValues);
          }
          BIRKHOFF_UNROLL_BY(1)
          for (int at = 0; at < kTileRows && first + at < this->other_length_; at += kAtOnce) {
            Pairs s = {}, d_s = {};
            this->multiply_rows(s, own, Body::rows_of(stage), at);
            this->multiply_rows(d_s, own_values, Body::values_of(stage), at);
            take_gradient(s, d_s, first + at);
            this->multiply_columns(d_rows, d_s, Body::rows_of(stage), at);
          }
        });
    this->store_own(d_rows, p_.scale, kRows, this->own_.d_rows);
  }

 private:
  // Turns products into logits, and products d_out . v into d_S. `first`: the first column.
  BIRKHOFF_DEVICE void take_gradient(Pairs& s, Pairs& d_s, int first) const {
    this->take_logits(s, first);
    const auto potentials = potentials_of(p_.half_steps, first),
               delta = coefficients_of(p_.half_steps, first);
    BIRKHOFF_UNROLL
    for (int i = 0; i < 4 * kGroups; ++i) {
      const int j = i / 4, r = i % 4;
      d_s[j][r] = thread_.exp2(s[j][r] + potentials.at(j, r)) * (d_s[j][r] - delta.at(j, r));
    }
    if (!p_.unrolled) return;
    BIRKHOFF_UNROLL_BY(1)
    for (int t = p_.half_steps - 1; t > 0; --t) subtract_term(t, s, d_s, first);
  }
  BIRKHOFF_DEVICE void subtract_term(int t, const Pairs& s, Pairs& d_s, int first) const {
    const auto potentials = potentials_of(t, first), x = coefficients_of(t, first);
    BIRKHOFF_UNROLL
    for (int i = 0; i < 4 * kGroups; ++i) {
      const int j = i / 4, r = i % 4;
      d_s[j][r] -= thread_.exp2(s[j][r] + potentials.at(j, r)) * x.at(j, r);
    }
  }
  BIRKHOFF_DEVICE LaneSums<kGroups> potentials_of(int t, int first) const {
    return this->template load_sums<kGroups>(this->own_potentials(t),
                                             this->other_potentials(t, first));
  }
  BIRKHOFF_DEVICE LaneSums<kGroups> coefficients_of(int t, int first) const {
    return this->template load_sums<kGroups>(this->own_coefficients(t),
                                             this->other_coefficients(t, first));
  }
};

}  // namespace birkhoff
