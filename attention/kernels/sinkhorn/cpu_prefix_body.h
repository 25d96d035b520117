// The loops of cpu_prefix.h, compiled once for each instruction set.
#pragma once

#include "attention/kernels/common/cpu_products.h"
#include "attention/kernels/sinkhorn/cpu_prefix.h"
#include "attention/kernels/sinkhorn/range.h"

namespace birkhoff {
namespace {

// One matrix, and the scalings of the kPanel prefixes that are being solved.
struct PrefixSolver {
  const PrefixBalance& call;
  int width;  // size, padded to whole panels and vectors
  double *e,
      *e_t;      // [width, width]: E and its transpose, 0 where the score is masked or out of range
  double* flow;  // [width, width], backward
  // [kept iterations, 2 kPanel, width]: x above a (before), b above y. The forward pass keeps one.
  double *left, *right;
  double *a, *sums;   // [kPanel, width]: a of the last iteration
  double *d_f, *d_g;  // [kPanel, width]
  int end_solvable;   // all scores of the prefixes before this one are in range
  bool keeps_all;

  static int padded(int size) { return padded_rows<double>(size); }
  static int num_kept(int iterations, bool keeps_all) { return keeps_all ? iterations : 1; }
  static std::size_t bytes(int size, int iterations, bool keeps_all) {
    const auto w = static_cast<std::size_t>(padded(size));
    const auto kept = static_cast<std::size_t>(num_kept(iterations, keeps_all));
    return (3 * w * w + (4 * kept + 4) * kPanel * w) * sizeof(double);
  }

  PrefixSolver(const PrefixBalance& new_call, void* memory)
      : call(new_call), width(padded(new_call.size)), keeps_all(new_call.d_scores != nullptr) {
    double* next = static_cast<double*>(memory);
    const auto take = [&](std::ptrdiff_t rows) {
      double* taken = next;
      next += rows * width;
      return taken;
    };
    for (double** square : {&e, &e_t, &flow}) *square = take(width);
    for (double** stack : {&left, &right})
      *stack = take(2 * kPanel * num_kept(call.iterations, keeps_all));
    for (double** panel : {&a, &sums, &d_f, &d_g}) *panel = take(kPanel);
    fill_exponentials();
  }

  std::ptrdiff_t place_of(int i) const {
    return std::ptrdiff_t{keeps_all ? 2 * i : 0} * kPanel * width;
  }
  double* x_of(int i) const { return left + place_of(i); }
  double* a_before(int i) const { return x_of(i) + kPanel * width; }
  double* b_of(int i) const { return right + place_of(i); }
  double* y_of(int i) const { return b_of(i) + kPanel * width; }
  double* a_after(int i) const { return i + 1 < call.iterations ? a_before(i + 1) : a; }

  // The shift is the first finite score met while the prefixes grow: later scores must not change a
  // bit of earlier prefixes.
  void fill_exponentials() {
    constexpr double kBarred = -__builtin_inf();
    const int N = call.size;
    bool has_shift = false;
    double shift = 0;
    end_solvable = N;
    const auto see = [&](int u, int r, int c) {
      const double s = call.scores[r * N + c];
      if (s == kBarred) return;
      if (!has_shift && s - s == 0) {
        shift = s;
        has_shift = true;
      }
      const double distance = s - shift;
      if (!(distance <= BalanceRange::kSpread && -distance <= BalanceRange::kSpread)) {
        end_solvable = u;
      }
    };
    for (int u = 1; u < N && end_solvable == N; ++u) {
      for (int r = 1; r <= u; ++r) see(u, r, u - 1);
      for (int c = 0; c + 1 < u; ++c) see(u, u, c);
    }
    for (int r = 0; r < width; ++r) {
      for (int c = 0; c < width; ++c) {
        const bool used = r > 0 && r < end_solvable && c + 1 < end_solvable;
        e[r * width + c] = used ? call.scores[r * N + c] - shift : kBarred;
      }
    }
    for (int i = 0; i < width * width; i += kLanes<double>) store(e + i, exp<double>(load(e + i)));
    transpose_matrix(e, width, width, width, e_t, width);
  }

  // out [kPanel, width] = in [kPanel, first `depth` columns] matrix.
  void multiply(const double* in, const double* matrix, int depth, int columns, double* out) const {
    multiply_panel(in, width, 1, matrix, width, depth, out, width,
                   round_up(columns, kLanes<double>),
                   /*accumulate=*/false);
  }

  // Inverts the first n elements of x where they are positive and sets all other elements to 0.
  // Returns false if a positive one is out of range.
  bool invert(double* x, int n) const {
    int num_bad = 0;
    for (int i = 0; i < n; ++i) {
      num_bad += x[i] > 0 && !(x[i] > BalanceRange::kMin && x[i] < 1 / BalanceRange::kMin);
      x[i] = x[i] > 0 ? 1 / x[i] : 0;
    }
    for (int i = n; i < width; ++i) x[i] = 0;
    return num_bad == 0;
  }

  // Solves the prefixes u0 .. u0 + kPanel - 1, as far as they exist. good[k] says whether u0 + k is
  // solved; the scalings of unsolved prefixes are 0.
  void solve(int u0, bool (&good)[kPanel]) const {
    const int rows = min_of(u0 + kPanel, call.size), columns = rows - 1;
    for (int k = 0; k < kPanel; ++k) {
      good[k] = u0 + k < end_solvable;
      double* start = a_before(0) + k * width;
      for (int r = 0; r < width; ++r) start[r] = good[k] && r <= u0 + k;
    }
    const auto step = [&](const double* in, const double* matrix, int depth, int count, int offset,
                          double* out) {
      multiply(in, matrix, depth, count, out);
      for (int k = 0; k < kPanel; ++k) {
        if (!invert(out + k * width, min_of(count, u0 + k + offset))) good[k] = false;
      }
    };
    for (int i = 0; i < call.iterations; ++i) {
      step(a_before(i), e, rows, columns, 0, b_of(i));
      step(b_of(i), e_t, columns, rows, 1, a_after(i));
    }
    for (int k = 0; k < kPanel; ++k) {
      if (good[k]) continue;
      for (int r = 0; r < width; ++r) a[k * width + r] = 0;
      for (int i = 0; i < num_kept(call.iterations, keeps_all); ++i) {
        for (int r = 0; r < width; ++r) a_before(i)[k * width + r] = b_of(i)[k * width + r] = 0;
      }
    }
  }

  void forward() const {
    const int N = call.size;
    for (int u0 = call.first_row; u0 < N; u0 += kPanel) {
      bool good[kPanel];
      solve(u0, good);
      for (int k = 0; k < min_of(kPanel, N - u0); ++k) {
        const int u = u0 + k;
        call.solved[u - call.first_row] = good[k];
        const double a_u = a[k * width + u], *b = b_of(call.iterations - 1) + k * width;
        double* row = call.p + (u - call.first_row) * N;
        for (int c = 0; c < u; ++c) row[c] = a_u * (e[u * width + c] * b[c]);
      }
    }
  }

  // The gradient of E in each step is an outer product of scalings and backward flows; `flow` is
  // the sum of these products.
  void backward() const {
    const int N = call.size, I = call.iterations;
    for (int i = 0; i < width * width; ++i) flow[i] = 0;
    for (int i = 0; i < kPanel * width; ++i)
      sums[i] = 0;  // multiply() sets only the columns in use
    for (int u0 = call.first_row; u0 < N; u0 += kPanel) {
      bool good[kPanel];
      solve(u0, good);
      const int rows = min_of(u0 + kPanel, N), columns = rows - 1;
      for (int i = 0; i < kPanel * width; ++i) d_f[i] = d_g[i] = 0;
      for (int k = 0; k < rows - u0; ++k) {
        const int u = u0 + k;
        if (!good[k]) continue;
        const double a_u = a[k * width + u], *b = b_of(I - 1) + k * width;
        const double* d_row = call.d_p + (u - call.first_row) * N;
        for (int c = 0; c < u; ++c) {
          const double d = a_u * (e[u * width + c] * b[c]) * d_row[c];
          call.d_scores[u * N + c] += d;
          d_f[k * width + u] += d;
          d_g[k * width + c] += d;
        }
      }
      for (int i = I - 1; i >= 0; --i) {
        double *x = x_of(i), *y = y_of(i), *before = a_before(i), *b = b_of(i), *after = a_after(i);
        for (int j = 0; j < kPanel * width; ++j) x[j] = d_f[j] * after[j];
        multiply(x, e, rows, columns, sums);
        for (int j = 0; j < kPanel * width; ++j) {
          y[j] = (d_g[j] - b[j] * sums[j]) * b[j];
          d_g[j] = 0;
        }
        multiply(y, e_t, columns, rows, d_f);
        for (int j = 0; j < kPanel * width; ++j) d_f[j] *= -before[j];
      }
      for (int r = 0; r < rows; r += kPanel) {
        multiply_panel(left + r, 1, width, right, width, 2 * kPanel * I, flow + r * width, width,
                       round_up(columns, kLanes<double>), /*accumulate=*/true);
      }
    }
    for (int r = 0; r < N; ++r) {
      for (int c = 0; c < N; ++c)
        call.d_scores[r * N + c] -= e[r * width + c] * flow[r * width + c];
    }
  }
};

void prefix_forward(const PrefixBalance& balance, void* scratch) {
  PrefixSolver(balance, scratch).forward();
}
void prefix_backward(const PrefixBalance& balance, void* scratch) {
  PrefixSolver(balance, scratch).backward();
}

constexpr PrefixBalanceKernels kPrefixBalanceKernels = {&PrefixSolver::bytes, &prefix_forward,
                                                        &prefix_backward};

}  // namespace
}  // namespace birkhoff
