// The half-steps of doubly stochastic attention (sinkformer.h has the formulas).
//
// SinkformerStep: half-step t < T. A thread block owns 64 rows of the side that t normalizes and
// passes over all rows of the other side. SinkformerAttend: the last half-step, which normalizes
// queries, with the outputs.
//
// A warp owns 16 rows. Shared memory holds the own tile and, for the tile in use and the next one,
// what is read of the other side: 25 and 49 KiB for D = 64 and 128, 41 and 81 with the outputs.
// Products are 16-bit with fp32 sums; probabilities are rounded to 16 bits for the outputs;
// everything else is fp32, with exponents of 2. Each value has one owner, which adds in a fixed
// order: the same bits each time.
#pragma once

#include "attention/kernels/sinkformer/gpu_body.h"

namespace birkhoff {

template <typename Thread, int kHeadDim>
class SinkformerStep : public SinkformerBody<Thread, kHeadDim> {
  using Body = SinkformerBody<Thread, kHeadDim>;
  using Pairs = LanePairs<kTileRows / 8>;
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
    // Of rows lane / 4 and lane / 4 + 8, over this lane's columns.
    float maximum[2] = {-kInfinity, -kInfinity}, sum[2] = {0, 0};
    this->template visit_tiles<Body::kRowsStageBytes>(
        kStages,
        [&](std::uint32_t stage, int first) {
          this->load_other(Body::rows_of(stage), this->other_.rows, first);
          this->load_numbers(Body::numbers_of(stage, 0), this->other_potentials(p_.step, first));
        },
        [&](std::uint32_t stage, int first) {
          if (first == 0) this->load_own_rows(own, kOwn);
          Pairs s = {};
          this->multiply_rows(s, own, Body::rows_of(stage), 0);
          this->take_logits(s, Body::numbers_of(stage, 0), first);
          add_exponentials(s, maximum, sum);
        });
    const float log_mass = p_.step % 2 == 1 ? 0 : log2f(this->mass());
    float potentials[2];
    BIRKHOFF_UNROLL
    for (int half = 0; half < 2; ++half) {
      float largest = fmaxf(maximum[half], thread_.exchange(maximum[half], 1));
      largest = fmaxf(largest, thread_.exchange(largest, 2));
      const float total = this->row_sum(sum[half] * thread_.exp2(maximum[half] - largest));
      potentials[half] = log_mass - (largest + log2f(total));
    }
    this->store_values(this->own_potentials(p_.step), potentials);
  }

 private:
  // Adds exp(s - maximum) to `sum`, with the maximum over all of the lane's columns so far.
  BIRKHOFF_DEVICE void add_exponentials(const Pairs& s, float (&maximum)[2],
                                        float (&sum)[2]) const {
    BIRKHOFF_UNROLL
    for (int half = 0; half < 2; ++half) {
      float largest = maximum[half];
      BIRKHOFF_UNROLL
      for (int j = 0; j < kTileRows / 8; ++j) {
        largest = fmaxf(largest, fmaxf(s[j][2 * half], s[j][2 * half + 1]));
      }
      const float shift = largest == -kInfinity ? 0 : largest;
      float total = sum[half] * thread_.exp2(maximum[half] - shift);
      BIRKHOFF_UNROLL
      for (int j = 0; j < kTileRows / 8; ++j) {
        total += thread_.exp2(s[j][2 * half] - shift) + thread_.exp2(s[j][2 * half + 1] - shift);
      }
      maximum[half] = largest;
      sum[half] = total;
    }
  }
};

template <typename Thread, int kHeadDim>
class SinkformerAttend : public SinkformerBody<Thread, kHeadDim> {
  using Body = SinkformerBody<Thread, kHeadDim>;
  using Shape = GpuTileShape<kHeadDim>;
  using Pairs = LanePairs<kTileRows / 8>;
  using Body::p_;
  using typename Body::Columns;
  using typename Body::OwnRows;

  static constexpr std::uint32_t kOwn = 0, kStages = Shape::kRowsBytes;

 public:
  static constexpr int kThreadBlocks = kHeadDim == 64 ? 3 : 1;
  static constexpr int kSharedBytes = kStages + 2 * Body::kStageBytes;

  using Body::Body;

  BIRKHOFF_DEVICE void run() {
    if (this->num_rows_ <= 0) return;
    this->load_own(kOwn, this->own_.rows);
    OwnRows own;
    Columns out = {};
    // Of rows lane / 4 and lane / 4 + 8; `sum` over this lane's columns.
    float maximum[2] = {-kInfinity, -kInfinity}, sum[2] = {0, 0};
    this->template visit_tiles<Body::kStageBytes>(
        kStages,
        [&](std::uint32_t stage, int first) {
          this->load_other(Body::rows_of(stage), this->other_.rows, first);
          this->load_other(Body::values_of(stage), this->other_.values, first);
          this->load_numbers(Body::numbers_of(stage, 0), this->other_potentials(p_.step, first));
        },
        [&](std::uint32_t stage, int first) {
          if (first == 0) this->load_own_rows(own, kOwn);
          Pairs s = {};
          this->multiply_rows(s, own, Body::rows_of(stage), 0);
          this->take_logits(s, Body::numbers_of(stage, 0), first);
          this->take_softmax(s, maximum, sum, out);
          this->multiply_columns(out, s, Body::values_of(stage), 0);
        });
    float potentials[2];
    BIRKHOFF_UNROLL
    for (int half = 0; half < 2; ++half) {
      const float total = this->row_sum(sum[half]), inverse = total == 0 ? 0 : 1 / total;
      potentials[half] = -(maximum[half] + log2f(total));
      BIRKHOFF_UNROLL
      for (int j = 0; j < Shape::kWarpColumns / 8; ++j) {
        out[j][2 * half] *= inverse;
        out[j][2 * half + 1] *= inverse;
      }
    }
    this->store_values(this->own_potentials(p_.step), potentials);
    this->store_own(out, 1, kOwn, p_.out);
  }
};

}  // namespace birkhoff
