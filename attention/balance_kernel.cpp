// Legend: S scores, E = exp(S - shift), a row scalings, b column scalings, R rows, C columns, N
// blocks.
#include "attention/balance_kernel.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace birkhoff {
namespace {

// Scores within kSpread of the shift and sums within [kLeast, 1 / kLeast] keep every product of two
// factors a normal number.
template <typename T>
struct Range;
template <>
struct Range<float> {
  static constexpr float kSpread = 30, kLeast = 1e-24f;
};
template <>
struct Range<double> {
  static constexpr double kSpread = 200, kLeast = 1e-200;
};

// y += factor * x: sums over rows of a matrix are made of these, which vectorise without
// reordering.
template <typename T>
[[gnu::always_inline]] inline void add_scaled(T factor, const T* __restrict x, T* __restrict y,
                                              std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] += factor * x[i];
}

// y = factors^T M for M [n, m] with rows `stride` apart.
template <typename T>
[[gnu::always_inline]] inline void multiply(const T* factors, const T* matrix, std::int64_t stride,
                                            std::int64_t n, std::int64_t m, T* y) {
  std::fill_n(y, m, T{0});
  for (std::int64_t i = 0; i < n; ++i) add_scaled(factors[i], matrix + i * stride, y, m);
}

// x = 1 / x where x > 0. False if some x > 0 is out of range.
template <typename T>
[[gnu::always_inline]] inline bool invert(T* x, std::int64_t n) {
  int num_bad = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    num_bad += x[i] > 0 && !(x[i] > Range<T>::kLeast && x[i] < 1 / Range<T>::kLeast);
    x[i] = x[i] > 0 ? 1 / x[i] : 0;
  }
  return num_bad == 0;
}

// E and its transpose, filled entry by entry. The shift is the first finite score, so that growing
// prefixes never change earlier entries: later blocks must not touch a bit of earlier rows.
template <typename T>
struct Exponentials {
  std::int64_t rows, columns;
  std::vector<T> e, transposed;
  bool has_shift = false, in_range = true;
  T shift = 0;

  Exponentials(std::int64_t num_rows, std::int64_t num_columns)
      : rows(num_rows),
        columns(num_columns),
        e(static_cast<std::size_t>(rows * columns), T{0}),
        transposed(e) {}

  void add(const T* scores, std::int64_t r, std::int64_t c) {
    const T score = scores[r * columns + c];
    if (score == -std::numeric_limits<T>::infinity()) return;
    if (!has_shift) shift = score;
    has_shift = true;
    const T x = score - shift;
    if (!(std::abs(x) <= Range<T>::kSpread)) {
      in_range = false;
      return;
    }
    e[static_cast<std::size_t>(r * columns + c)] = std::exp(x);
    transposed[static_cast<std::size_t>(c * rows + r)] = std::exp(x);
  }
};

// The scalings of each step of one problem: the leading R x C part of E.
template <typename T>
struct Scalings {
  std::int64_t iterations;
  std::vector<T> a, b;  // [iterations + 1, R], starting with ones; [iterations, C]

  Scalings(std::int64_t num_iterations, std::int64_t rows, std::int64_t columns)
      : iterations(num_iterations),
        a(static_cast<std::size_t>((iterations + 1) * rows)),
        b(static_cast<std::size_t>(iterations * columns)) {}

  // False if the problem leaves the number range.
  [[gnu::always_inline]] bool solve(const Exponentials<T>& exps, std::int64_t R, std::int64_t C) {
    if (!exps.in_range) return false;
    std::fill_n(a.data(), R, T{1});
    for (std::int64_t i = 0; i < iterations; ++i) {
      T* b_i = b.data() + i * C;
      multiply(a.data() + i * R, exps.e.data(), exps.columns, R, C, b_i);
      if (!invert(b_i, C)) return false;
      T* a_i = a.data() + (i + 1) * R;
      multiply(b_i, exps.transposed.data(), exps.rows, C, R, a_i);
      if (!invert(a_i, R)) return false;
    }
    return true;
  }
};

// p [last - first, stride] = rows first..last-1 of P.
template <typename T>
[[gnu::always_inline]] inline void write_rows(const Exponentials<T>& exps, const Scalings<T>& s,
                                              std::int64_t R, std::int64_t C, std::int64_t first,
                                              T* p) {
  const T* a = s.a.data() + s.iterations * R;
  const T* b = s.b.data() + (s.iterations - 1) * C;
  for (std::int64_t r = first; r < R; ++r) {
    const T* e = exps.e.data() + r * exps.columns;
    T* row = p + (r - first) * exps.columns;
    for (std::int64_t c = 0; c < C; ++c) row[c] = a[r] * (e[c] * b[c]);
  }
}

// Adds to d_scores the gradient of rows first..R-1 of P, given theirs in d_p.
template <typename T>
[[gnu::always_inline]] inline void add_gradient(const Exponentials<T>& exps, const Scalings<T>& s,
                                                std::int64_t R, std::int64_t C, std::int64_t first,
                                                const T* d_p, T* d_scores) {
  const std::int64_t stride = exps.columns;
  std::vector<T> d_f(static_cast<std::size_t>(R)), x(d_f), d_g(static_cast<std::size_t>(C)), y(d_g),
      sum(d_g), flow(static_cast<std::size_t>(R * C));
  const T* a = s.a.data() + s.iterations * R;
  const T* b = s.b.data() + (s.iterations - 1) * C;
  for (std::int64_t r = first; r < R; ++r) {
    const T* e = exps.e.data() + r * stride;
    for (std::int64_t c = 0; c < C; ++c) {
      const T d = a[r] * (e[c] * b[c]) * d_p[(r - first) * stride + c];
      d_scores[r * stride + c] += d;
      d_f[static_cast<std::size_t>(r)] += d;
      d_g[static_cast<std::size_t>(c)] += d;
    }
  }
  // Each step's share of d_scores is E times an outer product; `flow` is the sum of those products.
  for (std::int64_t i = s.iterations - 1; i >= 0; --i) {
    const T* a_after = s.a.data() + (i + 1) * R;
    const T* a_before = s.a.data() + i * R;
    const T* b_i = s.b.data() + i * C;
    for (std::int64_t r = 0; r < R; ++r) x[r] = d_f[r] * a_after[r];
    multiply(x.data(), exps.e.data(), stride, R, C, sum.data());
    for (std::int64_t c = 0; c < C; ++c) y[c] = (d_g[c] - b_i[c] * sum[c]) * b_i[c];
    for (std::int64_t r = 0; r < R; ++r) {
      add_scaled(x[r], b_i, flow.data() + r * C, C);
      add_scaled(a_before[r], y.data(), flow.data() + r * C, C);
    }
    multiply(y.data(), exps.transposed.data(), exps.rows, C, R, d_f.data());
    for (std::int64_t r = 0; r < R; ++r) d_f[r] *= -a_before[r];
    std::fill_n(d_g.data(), C, T{0});
  }
  for (std::int64_t r = 0; r < R; ++r) {
    const T* e = exps.e.data() + r * stride;
    for (std::int64_t c = 0; c < C; ++c) d_scores[r * stride + c] -= e[c] * flow[r * C + c];
  }
}

// One call's arrays; null where the pass has none.
template <typename T>
struct Call {
  const T* scores;
  std::int64_t rows, columns, iterations, first_row;
  T* p;
  bool* solved;
  const T* d_p;
  T* d_scores;
};

template <typename T>
struct WholeMatrix {
  [[gnu::always_inline]] static inline void run(const Call<T>& call, std::int64_t index) {
    const std::int64_t R = call.rows, C = call.columns, offset = index * R * C;
    const T* scores = call.scores + offset;
    Exponentials<T> exps(R, C);
    // The largest score first: it makes the best shift.
    const std::int64_t largest = std::max_element(scores, scores + R * C) - scores;
    exps.add(scores, largest / C, largest % C);
    for (std::int64_t i = 0; i < R * C; ++i) exps.add(scores, i / C, i % C);
    Scalings<T> scalings(call.iterations, R, C);
    const bool solved = scalings.solve(exps, R, C);
    if (call.p) {
      call.solved[index] = solved;
      if (solved) write_rows(exps, scalings, R, C, 0, call.p + offset);
    } else if (solved) {
      add_gradient(exps, scalings, R, C, 0, call.d_p + offset, call.d_scores + offset);
    }
  }
};

template <typename T>
struct Prefixes {
  [[gnu::always_inline]] static inline void run(const Call<T>& call, std::int64_t index) {
    const std::int64_t N = call.rows, num_results = N - call.first_row;
    const T* scores = call.scores + index * N * N;
    Exponentials<T> exps(N, N);
    Scalings<T> scalings(call.iterations, N, N);
    for (std::int64_t u = 0; u < N; ++u) {
      if (u > 0) {  // source u-1 and destination u join
        for (std::int64_t r = 0; r <= u; ++r) exps.add(scores, r, u - 1);
        for (std::int64_t c = 0; c + 1 < u; ++c) exps.add(scores, u, c);
      }
      if (u < call.first_row) continue;
      const std::int64_t result = index * num_results + u - call.first_row;
      const bool solved = scalings.solve(exps, u + 1, u);
      if (call.p) {
        call.solved[result] = solved;
        if (solved) write_rows(exps, scalings, u + 1, u, u, call.p + result * N);
      } else if (solved) {
        add_gradient(exps, scalings, u + 1, u, u, call.d_p + result * N,
                     call.d_scores + index * N * N);
      }
    }
  }
};

// The same code for the instruction sets of the day.
template <typename Work, typename T>
void run_portable(const Call<T>& call, std::int64_t index) {
  Work::run(call, index);
}
#if defined(__x86_64__)
template <typename Work, typename T>
[[gnu::target("avx2,fma")]] void run_avx2(const Call<T>& call, std::int64_t index) {
  Work::run(call, index);
}
template <typename Work, typename T>
[[gnu::target("avx512f,avx512dq,avx512vl")]] void run_avx512(const Call<T>& call,
                                                             std::int64_t index) {
  Work::run(call, index);
}
#endif

template <typename Work, typename T>
void run_all(const Call<T>& call, std::int64_t num_problems) {
  auto* run = &run_portable<Work, T>;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    run = &run_avx512<Work, T>;
  } else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    run = &run_avx2<Work, T>;
  }
#endif
  // A thread is worth its start for some ten microseconds of work.
  const std::int64_t work = call.iterations * call.rows * call.rows * call.columns + 1;
  const std::int64_t problems_per_thread = std::max<std::int64_t>(1, 100000 / work);
  at::parallel_for(0, num_problems, problems_per_thread, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t index = begin; index < end; ++index) run(call, index);
  });
}

std::int64_t num_problems(const at::Tensor& scores) {
  const std::int64_t size = scores.size(-1) * scores.size(-2);
  return size == 0 ? 0 : scores.numel() / size;
}

}  // namespace

std::pair<at::Tensor, at::Tensor> balance_kernel(const at::Tensor& scores,
                                                 std::int64_t iterations) {
  at::Tensor p = at::zeros_like(scores);
  at::Tensor solved =
      at::zeros_like(scores.narrow(-1, 0, 1).narrow(-2, 0, 1), scores.options().dtype(at::kBool),
                     at::MemoryFormat::Contiguous);
  AT_DISPATCH_FLOATING_TYPES(scores.scalar_type(), "balance_kernel", [&] {
    const Call<scalar_t> call{scores.const_data_ptr<scalar_t>(),
                              scores.size(-2),
                              scores.size(-1),
                              iterations,
                              0,
                              p.mutable_data_ptr<scalar_t>(),
                              solved.mutable_data_ptr<bool>(),
                              nullptr,
                              nullptr};
    run_all<WholeMatrix<scalar_t>>(call, num_problems(scores));
  });
  return {p, solved};
}

at::Tensor balance_kernel_backward(const at::Tensor& scores, const at::Tensor& d_p,
                                   std::int64_t iterations) {
  at::Tensor d_scores = at::zeros_like(scores);
  AT_DISPATCH_FLOATING_TYPES(scores.scalar_type(), "balance_kernel_backward", [&] {
    const Call<scalar_t> call{scores.const_data_ptr<scalar_t>(),
                              scores.size(-2),
                              scores.size(-1),
                              iterations,
                              0,
                              nullptr,
                              nullptr,
                              d_p.const_data_ptr<scalar_t>(),
                              d_scores.mutable_data_ptr<scalar_t>()};
    run_all<WholeMatrix<scalar_t>>(call, num_problems(scores));
  });
  return d_scores;
}

std::pair<at::Tensor, at::Tensor> prefix_balance_kernel(const at::Tensor& scores,
                                                        std::int64_t iterations,
                                                        std::int64_t first_row) {
  at::Tensor p = at::zeros_like(scores.narrow(-2, first_row, scores.size(-2) - first_row),
                                scores.options(), at::MemoryFormat::Contiguous);
  at::Tensor solved = at::zeros_like(p.narrow(-1, 0, 1), scores.options().dtype(at::kBool),
                                     at::MemoryFormat::Contiguous);
  AT_DISPATCH_FLOATING_TYPES(scores.scalar_type(), "prefix_balance_kernel", [&] {
    const Call<scalar_t> call{scores.const_data_ptr<scalar_t>(),
                              scores.size(-2),
                              scores.size(-1),
                              iterations,
                              first_row,
                              p.mutable_data_ptr<scalar_t>(),
                              solved.mutable_data_ptr<bool>(),
                              nullptr,
                              nullptr};
    run_all<Prefixes<scalar_t>>(call, num_problems(scores));
  });
  return {p, solved};
}

at::Tensor prefix_balance_kernel_backward(const at::Tensor& scores, const at::Tensor& d_p,
                                          std::int64_t iterations, std::int64_t first_row) {
  at::Tensor d_scores = at::zeros_like(scores);
  AT_DISPATCH_FLOATING_TYPES(scores.scalar_type(), "prefix_balance_kernel_backward", [&] {
    const Call<scalar_t> call{scores.const_data_ptr<scalar_t>(),
                              scores.size(-2),
                              scores.size(-1),
                              iterations,
                              first_row,
                              nullptr,
                              nullptr,
                              d_p.const_data_ptr<scalar_t>(),
                              d_scores.mutable_data_ptr<scalar_t>()};
    run_all<Prefixes<scalar_t>>(call, num_problems(scores));
  });
  return d_scores;
}

}  // namespace birkhoff
