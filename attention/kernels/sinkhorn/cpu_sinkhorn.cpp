// Legend: S scores, E = exp(S - shift), a row scalings, b column scalings, R rows, C columns, N
// blocks.
#include "attention/kernels/sinkhorn/cpu_sinkhorn.h"

#include <ATen/Parallel.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "attention/kernels/sinkhorn/range.h"
#include "attention/kernels/tile_attention/cpu_loop.h"
#include "cluster/base/instruction_set.h"

namespace birkhoff {
namespace {

// y += factor * x. Sums over the rows of a matrix are built from this loop, because it vectorizes
// without reordering.
[[gnu::always_inline]] inline void add_scaled(double factor, const double* __restrict x,
                                              double* __restrict y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] += factor * x[i];
}

// y = factors^T M for kVectors vectors of columns of M [n, ..] whose rows are `stride` apart. The
// sums stay in registers.
using Vector4 [[gnu::vector_size(32)]] = double;
template <int kVectors>
[[gnu::always_inline]] inline void multiply_columns(const double* factors, const double* matrix,
                                                    std::int64_t stride, std::int64_t n,
                                                    double* y) {
  Vector4 sum[kVectors] = {};
  for (std::int64_t i = 0; i < n; ++i) {
    for (int v = 0; v < kVectors; ++v) {
      Vector4 x;
      __builtin_memcpy(&x, matrix + i * stride + 4 * v, sizeof(x));
      sum[v] += factors[i] * x;
    }
  }
  __builtin_memcpy(y, sum, sizeof(sum));
}
// The same for all m columns.
[[gnu::always_inline]] inline void multiply(const double* factors, const double* matrix,
                                            std::int64_t stride, std::int64_t n, std::int64_t m,
                                            double* y) {
  std::int64_t c = 0;
  for (; c + 32 <= m; c += 32) multiply_columns<8>(factors, matrix + c, stride, n, y + c);
  for (; c + 4 <= m; c += 4) multiply_columns<1>(factors, matrix + c, stride, n, y + c);
  std::fill(y + c, y + m, 0.0);
  for (std::int64_t i = 0; i < n; ++i) {
    add_scaled(factors[i], matrix + i * stride + c, y + c, m - c);
  }
}

// Sets x to 1 / x where x > 0. Returns false if some x > 0 is out of range.
[[gnu::always_inline]] inline bool invert(double* x, std::int64_t n) {
  int num_bad = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    num_bad += x[i] > 0 && !(x[i] > BalanceRange::kMin && x[i] < 1 / BalanceRange::kMin);
    x[i] = x[i] > 0 ? 1 / x[i] : 0;
  }
  return num_bad == 0;
}

// E and its transpose; the shift is the largest score.
struct Exponentials {
  std::int64_t rows, columns;
  std::vector<double> e, transposed;
  bool in_range = true;

  template <typename T>
  [[gnu::always_inline]] inline Exponentials(const T* scores, std::int64_t num_rows,
                                             std::int64_t num_columns)
      : rows(num_rows),
        columns(num_columns),
        e(static_cast<std::size_t>(rows * columns)),
        transposed(static_cast<std::size_t>(rows * columns)) {
    constexpr double kBarred = -std::numeric_limits<double>::infinity();
    const std::int64_t size = rows * columns;
    double largest = kBarred;
#pragma omp simd reduction(max : largest)
    for (std::int64_t i = 0; i < size; ++i) {
      largest = scores[i] > largest ? static_cast<double>(scores[i]) : largest;
    }
    const double shift = largest == kBarred ? 0 : largest;
    int num_bad = 0;
#pragma omp simd reduction(+ : num_bad)
    for (std::int64_t i = 0; i < size; ++i) {
      const double x = static_cast<double>(scores[i]) - shift;
      num_bad += static_cast<int>(x != kBarred) & static_cast<int>(!(std::abs(x) <= kSpread));
      e[static_cast<std::size_t>(i)] = x;
    }
    in_range = num_bad == 0;
    if (!in_range) return;
    tile_kernels<double>().exp(e.data(), e.data(), e.size());
    // Eight rows at a time, so that both sides use whole cache lines.
    constexpr std::int64_t kTogether = 8;
    std::int64_t r = 0;
    for (; r + kTogether <= rows; r += kTogether) {
      for (std::int64_t c = 0; c < columns; ++c) {
        for (std::int64_t n = 0; n < kTogether; ++n) {
          transposed[static_cast<std::size_t>(c * rows + r + n)] =
              e[static_cast<std::size_t>((r + n) * columns + c)];
        }
      }
    }
    for (; r < rows; ++r) {
      for (std::int64_t c = 0; c < columns; ++c) {
        transposed[static_cast<std::size_t>(c * rows + r)] =
            e[static_cast<std::size_t>(r * columns + c)];
      }
    }
  }

 private:
  static constexpr double kSpread = BalanceRange::kSpread;
};

// The scalings of one problem: of all iterations when gradients are needed, otherwise of the last
// only.
struct Scalings {
  std::int64_t iterations, kept;
  std::vector<double> a, b;  // [kept + 1, R], starting with ones; [kept, C]

  Scalings(std::int64_t num_iterations, bool keeps_all, std::int64_t rows, std::int64_t columns)
      : iterations(num_iterations),
        kept(keeps_all ? iterations : 1),
        a(static_cast<std::size_t>((kept + 1) * rows)),
        b(static_cast<std::size_t>(kept * columns)) {}

  // Returns false if the problem leaves the number range.
  [[gnu::always_inline]] bool solve(const Exponentials& exps, std::int64_t R, std::int64_t C) {
    if (!exps.in_range) return false;
    std::fill_n(a.data(), R, 1.0);
    for (std::int64_t step = 0; step < iterations; ++step) {
      // If only one is kept, the result of a row step is the start of the next column step.
      const std::int64_t i = std::min(step, kept - 1);
      double* b_i = b.data() + i * C;
      multiply(a.data() + std::min(step, kept) * R, exps.e.data(), exps.columns, R, C, b_i);
      if (!invert(b_i, C)) return false;
      double* a_i = a.data() + (i + 1) * R;
      multiply(b_i, exps.transposed.data(), exps.rows, C, R, a_i);
      if (!invert(a_i, R)) return false;
    }
    return true;
  }
};

template <typename T>
[[gnu::always_inline]] inline void write_p(const Exponentials& exps, const Scalings& s,
                                           std::int64_t R, std::int64_t C, T* p) {
  const double* a = s.a.data() + s.kept * R;
  const double* b = s.b.data() + (s.kept - 1) * C;
  for (std::int64_t r = 0; r < R; ++r) {
    const double* e = exps.e.data() + r * exps.columns;
    T* row = p + r * exps.columns;
    for (std::int64_t c = 0; c < C; ++c) row[c] = static_cast<T>(a[r] * (e[c] * b[c]));
  }
}

// Writes dLoss/dS, given d_p = dLoss/dP.
template <typename T>
[[gnu::always_inline]] inline void write_gradient(const Exponentials& exps, const Scalings& s,
                                                  std::int64_t R, std::int64_t C, const T* d_p,
                                                  T* d_scores) {
  const std::int64_t stride = exps.columns;
  std::vector<double> d_f(static_cast<std::size_t>(R)), x(d_f), d_g(static_cast<std::size_t>(C)),
      y(d_g), sum(d_g), flow(static_cast<std::size_t>(R * C)), direct(flow);
  const double* a = s.a.data() + s.iterations * R;
  const double* b = s.b.data() + (s.iterations - 1) * C;
  for (std::int64_t r = 0; r < R; ++r) {
    const double* e = exps.e.data() + r * stride;
    for (std::int64_t c = 0; c < C; ++c) {
      const double d = a[r] * (e[c] * b[c]) * static_cast<double>(d_p[r * stride + c]);
      direct[static_cast<std::size_t>(r * C + c)] = d;
      d_g[static_cast<std::size_t>(c)] += d;
    }
  }
  // Sums of rows, several at a time: each addition waits for the one before it.
  constexpr std::int64_t kTogether = 8;
  std::int64_t first = 0;
  for (; first + kTogether <= R; first += kTogether) {
    double total[kTogether] = {};
    for (std::int64_t c = 0; c < C; ++c) {
      for (std::int64_t n = 0; n < kTogether; ++n) {
        total[n] += direct[static_cast<std::size_t>((first + n) * C + c)];
      }
    }
    std::copy_n(total, kTogether, d_f.begin() + first);
  }
  for (std::int64_t r = first; r < R; ++r) {
    for (std::int64_t c = 0; c < C; ++c) {
      d_f[static_cast<std::size_t>(r)] += direct[static_cast<std::size_t>(r * C + c)];
    }
  }
  // Each step's share of d_scores is E times an outer product; `flow` is the sum of those products.
  for (std::int64_t i = s.iterations - 1; i >= 0; --i) {
    const double* a_after = s.a.data() + (i + 1) * R;
    const double* a_before = s.a.data() + i * R;
    const double* b_i = s.b.data() + i * C;
    for (std::int64_t r = 0; r < R; ++r) x[r] = d_f[r] * a_after[r];
    multiply(x.data(), exps.e.data(), stride, R, C, sum.data());
    for (std::int64_t c = 0; c < C; ++c) y[c] = (d_g[c] - b_i[c] * sum[c]) * b_i[c];
    for (std::int64_t r = 0; r < R; ++r) {
      add_scaled(x[r], b_i, flow.data() + r * C, C);
      add_scaled(a_before[r], y.data(), flow.data() + r * C, C);
    }
    multiply(y.data(), exps.transposed.data(), exps.rows, C, R, d_f.data());
    for (std::int64_t r = 0; r < R; ++r) d_f[r] *= -a_before[r];
    std::fill_n(d_g.data(), C, 0.0);
  }
  for (std::int64_t r = 0; r < R; ++r) {
    const double* e = exps.e.data() + r * stride;
    const double *d = direct.data() + r * C, *outer = flow.data() + r * C;
    for (std::int64_t c = 0; c < C; ++c) {
      d_scores[r * stride + c] = static_cast<T>(d[c] - e[c] * outer[c]);
    }
  }
}

// The arrays of one call; null where the pass does not use them.
template <typename T>
struct BalanceCall {
  const T* scores;
  std::int64_t rows, columns, iterations;
  T* p;
  bool* solved;
  const T* d_p;
  T* d_scores;
};

struct WholeMatrix {
  template <typename T>
  [[gnu::always_inline]] static inline void run(const BalanceCall<T>& call, std::int64_t index) {
    const std::int64_t R = call.rows, C = call.columns, offset = index * R * C;
    const T* scores = call.scores + offset;
    const Exponentials exps(scores, R, C);
    Scalings scalings(call.iterations, /*keeps_all=*/call.d_scores != nullptr, R, C);
    const bool solved = scalings.solve(exps, R, C);
    if (call.p) {
      call.solved[index] = solved;
      if (solved) write_p(exps, scalings, R, C, call.p + offset);
    } else if (solved) {
      write_gradient(exps, scalings, R, C, call.d_p + offset, call.d_scores + offset);
    }
  }
};

// Row u needs only rows up to u: column sums run over the destinations so far.
struct Cumulative {
  // c[i][u]: the column sums [N] of iteration i up to row u. a[i][u]: the scaling of row u. Kept
  // for all iterations when gradients are needed, otherwise for the last only.
  struct Rows {
    std::int64_t N, iterations, kept;
    std::vector<double> e, c, a;

    Rows(std::int64_t size, std::int64_t num_iterations, bool keeps_all)
        : N(size),
          iterations(num_iterations),
          kept(keeps_all ? iterations : 1),
          e(static_cast<std::size_t>(N * N)),
          c(static_cast<std::size_t>(kept * N * N)),
          a(static_cast<std::size_t>((kept + 1) * N), 1.0) {}
    double* sums(std::int64_t i, std::int64_t u) {
      return c.data() + (std::min(i, kept - 1) * N + u) * N;
    }
    // The scaling before iteration i; for i = iterations, the one after the last.
    double& scaling(std::int64_t i, std::int64_t u) {
      return a[static_cast<std::size_t>(std::min(i, kept) * N + u)];
    }
  };

  // Fills row u of E, with each column shifted by its first finite score. Returns false if a score
  // is out of range.
  template <typename T>
  [[gnu::always_inline]] static inline bool fill_row(const T* scores, std::int64_t u,
                                                     std::vector<double>& shift, Rows& rows) {
    constexpr double kBarred = -std::numeric_limits<double>::infinity();
    int num_bad = 0;
    double* e = rows.e.data() + u * rows.N;
    for (std::int64_t v = 0; v < u; ++v) {
      const double s = static_cast<double>(scores[u * rows.N + v]);
      if (shift[static_cast<std::size_t>(v)] == kBarred) shift[static_cast<std::size_t>(v)] = s;
      e[v] = s == kBarred ? kBarred : s - shift[static_cast<std::size_t>(v)];
      num_bad += s != kBarred && !(std::abs(e[v]) <= BalanceRange::kSpread);
    }
    tile_kernels<double>().exp(e, e, static_cast<std::size_t>(u));
    return num_bad == 0;
  }

  // Returns the first row that leaves the number range, or N if none does. No row depends on later
  // rows.
  template <typename T>
  [[gnu::always_inline]] static inline std::int64_t solve(const T* scores, Rows& rows) {
    const std::int64_t N = rows.N;
    std::vector<double> shift(static_cast<std::size_t>(N),
                              -std::numeric_limits<double>::infinity());
    std::int64_t end = 0;
    while (end < N && fill_row(scores, end, shift, rows)) ++end;
    for (std::int64_t i = 0; i < rows.iterations; ++i) {
      for (std::int64_t u = 0; u < end; ++u) {
        const double* e = rows.e.data() + u * N;
        const double* before = u > 0 ? rows.sums(i, u - 1) : e;
        double* c = rows.sums(i, u);
        const double a = rows.scaling(i, u);
        double total = 0;
#pragma omp simd reduction(+ : total)
        for (std::int64_t v = 0; v < u; ++v) {
          c[v] = (v + 1 < u ? before[v] : 0) + e[v] * a;
          total += c[v] > 0 ? e[v] / c[v] : 0;
        }
        double least = 1;
        for (std::int64_t v = 0; v < u; ++v) {
          if (c[v] > 0 && c[v] < least) least = c[v];
        }
        const double after = 1 / (1 + total);
        if (!(least > BalanceRange::kMin && after > BalanceRange::kMin)) end = u;
        rows.scaling(i + 1, u) = after;
      }
    }
    return end;
  }

  template <typename T>
  [[gnu::always_inline]] static inline void write(Rows& rows, std::int64_t end_row, T* p) {
    const std::int64_t N = rows.N;
    for (std::int64_t u = 0; u < end_row; ++u) {
      const double a = rows.scaling(rows.iterations, u);
      const double *e = rows.e.data() + u * N, *c = rows.sums(rows.iterations - 1, u);
      for (std::int64_t v = 0; v < u; ++v)
        p[u * N + v] = static_cast<T>(c[v] > 0 ? a * (e[v] / c[v]) : 0);
    }
  }

  // Runs from row end_row - 1 up to row 1. r[i] is the gradient that the column sums of this row
  // and of later rows have received: all of these sums include this row.
  template <typename T>
  [[gnu::always_inline]] static inline void add_gradient(Rows& rows, std::int64_t end_row,
                                                         const T* d_p, T* d_scores) {
    const std::int64_t N = rows.N, I = rows.iterations;
    std::vector<double> r(static_cast<std::size_t>(I * N)), d_e(static_cast<std::size_t>(N)),
        d_b(static_cast<std::size_t>(N));
    for (std::int64_t u = end_row - 1; u > 0; --u) {
      const double* e = rows.e.data() + u * N;
      std::fill(d_e.begin(), d_e.end(), 0.0);
      // The gradients that P passes to a and b of the last iteration.
      const double a_last = rows.scaling(I, u);
      const double* c_last = rows.sums(I - 1, u);
      double d_a = 0;
#pragma omp simd reduction(+ : d_a)
      for (std::int64_t v = 0; v < u; ++v) {
        const double b = c_last[v] > 0 ? 1 / c_last[v] : 0, d = static_cast<double>(d_p[u * N + v]);
        d_a += e[v] * b * d;
        d_e[v] = a_last * b * d;
        d_b[v] = a_last * e[v] * d;
      }
      for (std::int64_t i = I - 1; i >= 0; --i) {
        const double a = rows.scaling(i + 1, u), a_before = rows.scaling(i, u);
        const double d_total = -a * a * d_a;
        const double* c = rows.sums(i, u);
        double* r_i = r.data() + i * N;
        d_a = 0;
#pragma omp simd reduction(+ : d_a)
        for (std::int64_t v = 0; v < u; ++v) {
          const double b = c[v] > 0 ? 1 / c[v] : 0;
          r_i[v] -= b * (b * (d_b[v] + e[v] * d_total));
          d_e[v] += b * d_total + r_i[v] * a_before;
          d_a += e[v] * r_i[v];
          d_b[v] = 0;
        }
      }
      for (std::int64_t v = 0; v < u; ++v) d_scores[u * N + v] = static_cast<T>(e[v] * d_e[v]);
    }
  }

  template <typename T>
  [[gnu::always_inline]] static inline void run(const BalanceCall<T>& call, std::int64_t index) {
    const std::int64_t N = call.rows, offset = index * N * N;
    Rows rows(N, call.iterations, /*keeps_all=*/call.d_scores != nullptr);
    const std::int64_t end_row = solve(call.scores + offset, rows);
    if (call.p) {
      for (std::int64_t u = 0; u < N; ++u) call.solved[index * N + u] = u < end_row;
      write(rows, end_row, call.p + offset);
    } else {
      add_gradient(rows, end_row, call.d_p + offset, call.d_scores + offset);
    }
  }
};

// The same code, compiled for each instruction set.
template <typename Work, typename T>
void run_portable(const BalanceCall<T>& call, std::int64_t index) {
  Work::run(call, index);
}
#if defined(__x86_64__)
template <typename Work, typename T>
[[gnu::target("avx2,fma")]] void run_avx2(const BalanceCall<T>& call, std::int64_t index) {
  Work::run(call, index);
}
template <typename Work, typename T>
[[gnu::target("avx512f,avx512dq,avx512vl")]] void run_avx512(const BalanceCall<T>& call,
                                                             std::int64_t index) {
  Work::run(call, index);
}
#endif

// Solves all matrices of `scores`. `call` has the arrays of the pass.
template <typename Work, typename T>
void run_all(const at::Tensor& scores, std::int64_t iterations, BalanceCall<T> call) {
  call.scores = scores.const_data_ptr<T>();
  call.rows = scores.size(-2);
  call.columns = scores.size(-1);
  call.iterations = iterations;
  auto* run = &run_portable<Work, T>;
#if defined(__x86_64__)
  if (instruction_set() >= InstructionSet::kAvx512) {
    run = &run_avx512<Work, T>;
  } else if (instruction_set() == InstructionSet::kAvx2) {
    run = &run_avx2<Work, T>;
  }
#endif
  // Starting a thread pays off from about ten microseconds of work.
  const std::int64_t work = call.iterations * call.rows * call.rows * call.columns + 1;
  const std::int64_t problems_per_thread = std::max<std::int64_t>(1, 100000 / work);
  at::parallel_for(0, num_matrices(scores), problems_per_thread,
                   [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t index = begin; index < end; ++index) run(call, index);
                   });
}

// Calls f with an element of the scores' dtype.
template <typename F>
void with_dtype(const at::Tensor& scores, F f) {
  scores.scalar_type() == at::kDouble ? f(double{}) : f(float{});
}

// Returns P and `solved`, which has `solved_rows` flags for each problem.
template <typename Work>
std::pair<at::Tensor, at::Tensor> run_forward(const at::Tensor& scores, std::int64_t iterations,
                                              std::int64_t solved_rows) {
  at::Tensor p = at::zeros_like(scores);
  at::Tensor solved =
      at::zeros_like(scores.narrow(-1, 0, 1).narrow(-2, 0, solved_rows),
                     scores.options().dtype(at::kBool), at::MemoryFormat::Contiguous);
  with_dtype(scores, [&](auto element) {
    using T = decltype(element);
    BalanceCall<T> call{};
    call.p = p.mutable_data_ptr<T>();
    call.solved = solved.mutable_data_ptr<bool>();
    run_all<Work>(scores, iterations, call);
  });
  return {p, solved};
}

template <typename Work>
at::Tensor run_backward(const at::Tensor& scores, const at::Tensor& d_p, std::int64_t iterations) {
  at::Tensor d_scores = at::zeros_like(scores);
  with_dtype(scores, [&](auto element) {
    using T = decltype(element);
    BalanceCall<T> call{};
    call.d_p = d_p.const_data_ptr<T>();
    call.d_scores = d_scores.mutable_data_ptr<T>();
    run_all<Work>(scores, iterations, call);
  });
  return d_scores;
}

}  // namespace

std::pair<at::Tensor, at::Tensor> balance_kernel(const at::Tensor& scores,
                                                 std::int64_t iterations) {
  return run_forward<WholeMatrix>(scores, iterations, 1);
}

at::Tensor balance_kernel_backward(const at::Tensor& scores, const at::Tensor& d_p,
                                   std::int64_t iterations) {
  return run_backward<WholeMatrix>(scores, d_p, iterations);
}

std::pair<at::Tensor, at::Tensor> cumulative_balance_kernel(const at::Tensor& scores,
                                                            std::int64_t iterations) {
  return run_forward<Cumulative>(scores, iterations, scores.size(-2));
}

at::Tensor cumulative_balance_kernel_backward(const at::Tensor& scores, const at::Tensor& d_p,
                                              std::int64_t iterations) {
  return run_backward<Cumulative>(scores, d_p, iterations);
}

}  // namespace birkhoff
