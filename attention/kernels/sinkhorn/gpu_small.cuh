// A whole matrix of at most 128 rows and columns, balanced in the ordinary domain by one block of
// threads. gpu_launch.cu has the formulas. Legend: r destination of R, c source of C, i iteration
// of I.
//
// Each thread keeps a part of a row of E = exp(S) and a part of a column in registers, so that both
// steps are the same: a dot product with a vector in shared memory, among a few neighboring lanes.
// Rows and columns are padded with zeros to kSize. Shared memory: a kSize x kSize matrix, for
// transposing, and the vectors. No atomics: deterministic.
#pragma once

#include <cstddef>

#include "attention/kernels/sinkhorn/gpu_log_domain.cuh"
#include "attention/kernels/sinkhorn/range.h"
#include "cluster/base/gpu/elements.cuh"

namespace birkhoff {
namespace {

// Writes elements `first` to first + 3 of p.rounded.
__device__ inline void store_rounded(const BalanceParams& p, std::int64_t first,
                                     const float (&x)[4]) {
  const auto store = [&]<typename T>() {
    store_vector<T, 4>(
        static_cast<T*>(p.rounded) + first,
        {from_float<T>(x[0]), from_float<T>(x[1]), from_float<T>(x[2]), from_float<T>(x[3])});
  };
  if (p.rounded_dtype == KernelDtype::kHalf) return store.template operator()<__half>();
  store.template operator()<__nv_bfloat16>();
}

// Writes p.rounded, if wanted, for a matrix whose P the block has written.
template <int kThreads>
__device__ inline void round_p(const BalanceParams& p, std::int64_t matrix) {
  if (p.rounded == nullptr) return;
  __syncthreads();
  const int width = BalanceParams::rounded_columns(p.columns);
  for (int i = static_cast<int>(threadIdx.x) * 4; i < p.rows * width; i += kThreads * 4) {
    const int r = i / width, c = i % width;
    const float* row = p.p + (matrix * p.rows + r) * p.columns;
    float x[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) x[n] = c + n < p.columns ? row[c + n] : 0.0f;
    store_rounded(p, matrix * p.rows * width + i, x);
  }
}

// kSize: 16, 32, 64 or 128.
template <int kSize>
struct SmallMatrix {
  static constexpr int kGroups =
      kSize <= 64 ? 2 : 8;  // of four elements that a thread has of a line
  static constexpr int kLanes = kSize / (4 * kGroups);  // neighbors that share a line
  static constexpr int kThreads = kSize * kLanes;
  static constexpr int kBlocks = kSize == 64 ? 2 : 1;  // of a multiprocessor, at least
  static constexpr bool kCompletes = true;             // write_d_scores() leaves nothing to do
  static constexpr int kStride = kSize + 1;            // of the matrix in shared memory
  // The log domain's shared memory fits in the matrix's.
  using LogDomain =
      LogDomainProblem<(kSize + kWarp - 1) / kWarp, kThreads / kWarp, /*kShared=*/false>;

  using Part = float[kGroups][4];  // of a line

  const BalanceParams& p;
  std::int64_t matrix;
  int line, lane;          // this thread's row and column; its index among those sharing it
  Part rows_e, columns_e;  // E[line, place(j, n)] and E[place(j, n), line]
  bool in_range = true;    // of the scores and sums of this thread

  // Shared memory: [kSize, kStride]; [1], not 0 if a number left the range; and from vectors() on
  // the vectors, kSize elements each.
  __device__ static float* square() { return reinterpret_cast<float*>(balance_memory); }
  __device__ static float* failure() { return square() + kSize * kStride; }
  __device__ static float* vector(int number) { return failure() + 4 + number * kSize; }
  static std::size_t shared_bytes(int num_vectors) {
    return sizeof(float) * static_cast<std::size_t>(kSize * (kStride + num_vectors) + 4);
  }

  // The position of element n of group j of this thread's part of a line. The lanes of a line read
  // successive groups.
  __device__ int place(int j, int n) const { return 4 * (j * kLanes + lane) + n; }

  __device__ SmallMatrix(const BalanceParams& params, std::int64_t number)
      : p(params),
        matrix(number),
        line(static_cast<int>(threadIdx.x) / kLanes),
        lane(static_cast<int>(threadIdx.x) % kLanes) {
    if (threadIdx.x == 0) *failure() = 0;
#pragma unroll
    for (int j = 0; j < kGroups; ++j) load(p.scores, -INFINITY, j, rows_e[j]);
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float s = rows_e[j][n];
        const bool masked = s == -INFINITY;
        in_range = in_range && (masked || fabsf(s) <= DeviceBalanceRange::kSpread);
        rows_e[j][n] = in_square(line, place(j, n)) = masked ? 0.0f : expf(s);
      }
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
#pragma unroll
      for (int n = 0; n < 4; ++n) columns_e[j][n] = in_square(place(j, n), line);
    }
  }

  // Whether rows of [matrices, R, C] can be moved 16 bytes at a time.
  __device__ bool is_aligned(const float* numbers) const {
    return p.columns % 4 == 0 && reinterpret_cast<std::uintptr_t>(numbers) % 16 == 0;
  }
  // Group j of this row's part of `numbers` [matrices, R, C]; `missing` beyond R and C.
  __device__ void load(const float* numbers, float missing, int j, float (&x)[4]) const {
    const float* from = numbers + (matrix * p.rows + line) * p.columns + place(j, 0);
    if (is_aligned(numbers) && line < p.rows && place(j, 0) < p.columns) {
      const Vector<float, 4> four = load_vector<float, 4>(from);
#pragma unroll
      for (int n = 0; n < 4; ++n) x[n] = four.elements[n];
      return;
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      x[n] = line < p.rows && place(j, n) < p.columns ? from[n] : missing;
    }
  }
  __device__ void store(const float (&x)[4], int j, float* numbers) const {
    if (line >= p.rows || place(j, 0) >= p.columns) return;
    float* to = numbers + (matrix * p.rows + line) * p.columns + place(j, 0);
    if (is_aligned(numbers)) return store_vector<float, 4>(to, {x[0], x[1], x[2], x[3]});
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (place(j, n) < p.columns) to[n] = x[n];
    }
  }

  __device__ float& in_square(int r, int c) const { return square()[r * kStride + c]; }

  // Group j of this thread's part of a vector.
  __device__ void read(const float* vector, int j, float (&x)[4]) const {
    const float4 four = *reinterpret_cast<const float4*>(vector + place(j, 0));
    x[0] = four.x;
    x[1] = four.y;
    x[2] = four.z;
    x[3] = four.w;
  }
  __device__ float dot(const Part& a, const float* vector) const {
    float sums[4] = {};
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      float b[4];
      read(vector, j, b);
#pragma unroll
      for (int n = 0; n < 4; ++n) sums[n] += a[j][n] * b[n];
    }
    return lane_sum<kLanes>((sums[0] + sums[1]) + (sums[2] + sums[3]));
  }
  // Sets element `line` of a vector. All threads of the block call this; when it returns, they see
  // the whole vector.
  __device__ void set(float* vector, float x) const {
    if (lane == 0) vector[line] = x;
    __syncthreads();
  }

  // 1 / x where x > 0, else 0.
  __device__ float inverse(float x) {
    if (x == 0) return 0;
    in_range = in_range && x > DeviceBalanceRange::kMin && x < 1 / DeviceBalanceRange::kMin;
    return 1 / x;
  }

  // Runs all column steps and the row steps between them, with a_i in vector f(i) and b_i in vector
  // g(i). Returns the sum that the last row step divides this row by, 1 if it is empty.
  template <typename F, typename G>
  __device__ float solve(F f, G g) {
    set(f(0), 1);
    for (int i = 0;; ++i) {
      set(g(i), inverse(dot(columns_e, f(i))));
      const float total = dot(rows_e, g(i)), a = inverse(total);
      if (i + 1 == p.iterations) return total > 0 ? total : 1.0f;
      set(f(i + 1), a);
    }
  }

  // Whether no number has left the range, in any thread; all call this.
  __device__ bool solved() const {
    if (!in_range) *failure() = 1;
    __syncthreads();
    return *failure() == 0;
  }

  // Writes P and, if wanted, P rounded.
  __device__ void write_p() {
    const auto f = [](int) { return vector(0); };
    const auto g = [](int) { return vector(1); };
    const float total = solve(f, g);
    if (!solved()) {
      LogDomain(p, matrix, 0, square()).write_p(p.iterations, p.p);
      return round_p<kThreads>(p, matrix);
    }
    const int width = BalanceParams::rounded_columns(p.columns);
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      float x[4];
      read(g(0), j, x);
#pragma unroll
      for (int n = 0; n < 4; ++n) x[n] = rows_e[j][n] * x[n] / total;  // 1 if it has one term
      store(x, j, p.p);
      if (p.rounded != nullptr && line < p.rows && place(j, 0) < width) {
        store_rounded(p, (matrix * p.rows + line) * width + place(j, 0), x);
      }
    }
  }

  // Writes dLoss/dS.
  __device__ void write_d_scores(const BalanceBackwardParams& backward) {
    const int I = p.iterations;
    const auto f = [](int i) { return vector(4 * i); };
    const auto g = [](int i) { return vector(4 * i + 1); };
    const auto x = [](int i) { return vector(4 * i + 2); };
    const auto y = [](int i) { return vector(4 * i + 3); };
    const float total = solve(f, g);
    if (!solved()) return write_d_scores_in_log_domain(backward);

    // d is computed where it is needed, from dLoss/dP in the square and these two vectors.
    float *const totals = vector(4 * I), *const means = vector(4 * I + 1);
    float sum = 0;
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      float b[4], d_p[4];
      read(g(I - 1), j, b);
      load(backward.d_p, 0, j, d_p);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        in_square(line, place(j, n)) = d_p[n];
        sum += rows_e[j][n] * b[n] / total * d_p[n];
      }
    }
    if (lane == 0) totals[line] = total;
    const float mean = lane_sum<kLanes>(sum);
    set(means, mean);
    sum = 0;
    const float last_b = g(I - 1)[line];
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      float row_totals[4], row_means[4];
      read(totals, j, row_totals);
      read(means, j, row_means);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        sum += columns_e[j][n] * last_b / row_totals[n] *
               (in_square(place(j, n), line) - row_means[n]);
      }
    }
    set(y(I - 1), lane_sum<kLanes>(sum) * last_b);
    for (int i = I - 2; i >= 0; --i) {
      // The square of a factor could leave the number range.
      const float a = f(i + 1)[line], b = g(i)[line];
      set(x(i), -(dot(rows_e, y(i + 1)) * a) * a);
      set(y(i), -(dot(columns_e, x(i)) * b) * b);
    }

#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      float b[4], y_i[4], flow[4] = {};
      for (int i = 0; i < I; ++i) {
        read(g(i), j, b);
        read(y(i), j, y_i);
        const float a = f(i)[line], x_i = i + 1 < I ? x(i)[line] : 0.0f;
#pragma unroll
        for (int n = 0; n < 4; ++n) flow[n] += x_i * b[n] + a * y_i[n];
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float e = rows_e[j][n];
        const float d = e * b[n] / total * (in_square(line, place(j, n)) - mean);
        flow[n] = e == 0 ? 0.0f : d - e * flow[n];
      }
      store(flow, j, backward.d_scores);
    }
  }

 private:
  __device__ void write_d_scores_in_log_domain(const BalanceBackwardParams& backward) const {
    const std::int64_t first = matrix * p.rows * p.columns;
    const Vectors vectors(backward, matrix);
    LogDomain(p, matrix, 0, square())
        .write_vectors(p.iterations, backward.d_p, vectors, backward.d_scores + first);
    __syncthreads();
    for (int entry = static_cast<int>(threadIdx.x); entry < p.rows * p.columns; entry += kThreads) {
      subtract_log_domain_share(backward, vectors, first, entry);
    }
  }
};

}  // namespace
}  // namespace birkhoff
