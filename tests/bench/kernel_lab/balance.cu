// Sinkhorn normalization of whole matrices and of prefixes, and the cumulative one, forward and
// backward.
#include <algorithm>
#include <cmath>

#include "attention/kernels/sinkhorn/gpu_params.h"
#include "tests/bench/kernel_lab/lab.h"

namespace birkhoff::lab {
namespace {

struct Shape {
  int matrices, size, iterations;
  BalanceKind kind;

  bool prefix() const { return kind == BalanceKind::kPrefix; }
  bool cumulative() const { return kind == BalanceKind::kCumulative; }
  std::int64_t elements() const { return std::int64_t{matrices} * size * size; }
  int first_row() const { return prefix() ? 1 : 0; }
  std::int64_t results() const { return std::int64_t{matrices} * (size - first_row()) * size; }
  std::string text() const {
    return "N " + std::to_string(size) + ", " + std::to_string(matrices) + " matrices, " +
           std::to_string(iterations) + " iterations";
  }
};

struct Tensors {
  Tensors(const Shape& s, std::uint64_t seed)
      : scores(s.elements()), d_scores(s.elements()), p(s.results()), d_p(s.results()) {
    scores.fill_random(seed + 1, 2);
    if (s.cumulative()) hide_later_columns(s.size);
    d_p.fill_random(seed + 2);
    problems.matrices = s.matrices;
    problems.rows = problems.columns = s.size;
    problems.iterations = s.iterations;
    problems.kind = s.kind;
    problems.first_row = s.first_row();
    problems.results = s.prefix() ? s.size - 1 : 1;
    scratch = Float(std::max<std::int64_t>(1, s.matrices * problems.scratch_per_matrix()));
    problems.scores = scores.get();
    problems.p = p.get();
    problems.scratch = scratch.get();
    backward.problems = problems;
    const std::int64_t size = BalanceBackwardParams::vectors_per_matrix(problems);
    vectors = Float(std::max<std::int64_t>(1, s.matrices * size));
    backward.d_p = d_p.get();
    backward.vectors = vectors.get();
    backward.d_scores = d_scores.get();
  }

  // A row sees the columns before its own.
  void hide_later_columns(int size) const {
    float* to = scores.get();
    for_each(scores.size(), [=] __device__(std::int64_t i) {
      if (i % size >= i / size % size) to[i] = -INFINITY;
    });
  }

  Float scores, d_scores, p, d_p, scratch, vectors;
  BalanceParams problems{};
  BalanceBackwardParams backward{};
};

// The formulas of attention/kernels/sinkhorn/gpu_launch.cu in the log domain; a thread solves a
// matrix or a prefix, whose vectors are in scratch memory.
template <typename Real>
struct Slow {
  int size, iterations, first_row;
  bool prefix;
  const float *scores, *d_p;
  Real *f, *g, *x, *y;  // [problems, iterations + 1, size]

  // Rows 1 .. u and columns 0 .. u - 1 with `prefix`, where u is the destination.
  __device__ int first() const { return prefix ? 1 : 0; }
  __device__ Real s(std::int64_t matrix, int r, int c) const {
    return scores[(matrix * size + r) * size + c];
  }
};

template <typename Real>
void solve(const Shape& s, const Tensors& t, const Float& p, const Float& d_scores) {
  const std::int64_t per_matrix = s.prefix() ? s.size - 1 : 1, problems = s.matrices * per_matrix;
  const std::int64_t vectors = problems * (s.iterations + 1) * s.size;
  const Array<Real> f(vectors), g(vectors), x(vectors), y(vectors);
  const Array<double> d(s.elements());
  cuda_check(cudaMemset(d.get(), 0, static_cast<std::size_t>(d.bytes())), "cudaMemset");
  double* d_s = d.get();
  float *to_p = p.get(), *to_d = d_scores.get();
  const Slow<Real> slow{s.size,      s.iterations, s.first_row(), s.prefix(), t.scores.get(),
                        t.d_p.get(), f.get(),      g.get(),       x.get(),    y.get()};
  for_each(problems, [=] __device__(std::int64_t problem) {
    const int size = slow.size, steps = slow.iterations;
    const std::int64_t matrix = problem / per_matrix;
    const int u = static_cast<int>(problem % per_matrix) + 1;
    const int first = slow.first(), end_row = slow.prefix ? u + 1 : size,
              end_column = slow.prefix ? u : size;
    Real* const f = slow.f + problem * (steps + 1) * size;
    Real* const g = slow.g + problem * (steps + 1) * size;
    Real* const x = slow.x + problem * (steps + 1) * size;
    Real* const y = slow.y + problem * (steps + 1) * size;
    for (int r = 0; r < size; ++r) f[r] = 0;
    for (int i = 1; i <= steps; ++i) {
      for (int c = 0; c < end_column; ++c) {
        Real sum = 0;
        for (int r = first; r < end_row; ++r)
          sum += exp(slow.s(matrix, r, c) + f[(i - 1) * size + r]);
        g[i * size + c] = -log(sum);
      }
      for (int r = first; r < end_row; ++r) {
        Real sum = 0;
        for (int c = 0; c < end_column; ++c) sum += exp(slow.s(matrix, r, c) + g[i * size + c]);
        f[i * size + r] = -log(sum);
      }
    }
    const auto gradient = [&](int r, int c) -> Real {
      if (slow.prefix && r != u) return 0;
      const int row = slow.prefix ? u - 1 : r, rows = slow.prefix ? size - 1 : size;
      return slow.d_p[(matrix * rows + row) * size + c];
    };
    const auto entry = [&](int r, int c, int of_f, int of_g) {
      return exp(slow.s(matrix, r, c) + f[of_f * size + r] + g[of_g * size + c]);
    };
    for (int r = slow.prefix ? u : 0; r < end_row; ++r) {
      const int row = slow.prefix ? u - 1 : r, rows = slow.prefix ? size - 1 : size;
      for (int c = 0; c < size; ++c) {
        to_p[(matrix * rows + row) * size + c] =
            c < end_column ? static_cast<float>(entry(r, c, steps, steps)) : 0;
      }
    }
    for (int i = steps; i >= 1; --i) {
      for (int r = first; r < end_row; ++r) {
        Real sum = 0;
        for (int c = 0; c < end_column; ++c) {
          sum += i == steps ? entry(r, c, i, i) * gradient(r, c)
                            : -entry(r, c, i, i + 1) * y[(i + 1) * size + c];
        }
        x[i * size + r] = sum;
      }
      for (int c = 0; c < end_column; ++c) {
        Real sum = 0;
        for (int r = first; r < end_row; ++r) {
          sum += entry(r, c, i, i) * ((i == steps ? gradient(r, c) : 0) - x[i * size + r]);
        }
        y[i * size + c] = sum;
      }
    }
    for (int r = first; r < end_row; ++r) {
      for (int c = 0; c < end_column; ++c) {
        Real sum = entry(r, c, steps, steps) * (gradient(r, c) - x[steps * size + r]);
        for (int i = 1; i < steps; ++i) sum -= x[i * size + r] * entry(r, c, i, i);
        for (int i = 1; i <= steps; ++i) sum -= y[i * size + c] * entry(r, c, i - 1, i);
        atomicAdd(d_s + (matrix * size + r) * size + c, static_cast<double>(sum));
      }
    }
  });
  for_each(s.elements(), [=] __device__(std::int64_t i) { to_d[i] = static_cast<float>(d_s[i]); });
}

// The formulas of attention/kernels/sinkhorn/gpu_cumulative.cu; a thread solves a matrix. Row u
// has the columns before u.
template <typename Real>
void solve_cumulative(const Shape& s, const Tensors& t, const Float& p, const Float& d_scores) {
  const int size = s.size, steps = s.iterations;
  // g and the gradient of each element; f, x of each row, r of each column.
  const Array<Real> all_g(steps * s.elements()), all_d(s.elements()),
      all_f(std::int64_t{s.matrices} * (steps + 1) * size), all_x(std::int64_t{s.matrices} * size),
      all_r(all_x.size());
  p.zero();
  d_scores.zero();
  const float *of_scores = t.scores.get(), *of_d_p = t.d_p.get();
  Real *gs = all_g.get(), *ds = all_d.get(), *fs = all_f.get(), *xs = all_x.get(),
       *rs = all_r.get();
  float *of_p = p.get(), *of_d_scores = d_scores.get();
  for_each(s.matrices, [=] __device__(std::int64_t matrix) {
    const std::int64_t elements = std::int64_t{size} * size, first = matrix * elements;
    const float *scores = of_scores + first, *d_p = of_d_p + first;
    Real *g = gs + first * steps, *d = ds + first, *f = fs + matrix * (steps + 1) * size,
         *x = xs + matrix * size, *r = rs + matrix * size;
    const auto g_of = [&](int i, int u, int v) -> Real& {
      return g[((i - 1) * size + u) * size + v];
    };
    const auto entry = [&](int u, int v, int of_f, int of_g) {
      return exp(scores[u * size + v] + f[of_f * size + u] + g_of(of_g, u, v));
    };
    for (int u = 0; u < size; ++u) f[u] = 0;
    for (int i = 1; i <= steps; ++i) {
      for (int u = 0; u < size; ++u) {
        Real sum = 1;
        for (int v = 0; v < u; ++v) {
          const Real own = scores[u * size + v] + f[(i - 1) * size + u];
          const Real before = v + 1 < u ? -g_of(i, u - 1, v) : own;
          const Real most = before < own ? own : before, least = before < own ? before : own;
          g_of(i, u, v) = v + 1 < u ? -(most + log1p(exp(least - most))) : -own;
          sum += exp(scores[u * size + v] + g_of(i, u, v));
        }
        f[i * size + u] = -log(sum);
      }
    }
    for (int u = 0; u < size; ++u) {
      x[u] = 0;
      for (int v = 0; v < u; ++v) {
        const Real weight = entry(u, v, steps, steps);
        of_p[first + u * size + v] = static_cast<float>(weight);
        x[u] += weight * d_p[u * size + v];
        d[u * size + v] = 0;
      }
    }
    for (int i = steps; i >= 1; --i) {
      for (int v = 0; v < size; ++v) r[v] = 0;
      for (int u = size - 1; u >= 0; --u) {
        Real sum = 0;
        for (int v = 0; v < u; ++v) {
          const Real y = entry(u, v, i, i) * ((i == steps ? d_p[u * size + v] : 0) - x[u]);
          r[v] = y + (u + 1 < size ? exp(g_of(i, u + 1, v) - g_of(i, u, v)) * r[v] : 0);
          const Real flow = entry(u, v, i - 1, i) * r[v];
          d[u * size + v] += y - flow;
          sum += flow;
        }
        x[u] = -sum;
      }
    }
    for (int u = 0; u < size; ++u) {
      for (int v = 0; v < u; ++v) {
        of_d_scores[first + u * size + v] = static_cast<float>(d[u * size + v]);
      }
    }
  });
}

void run(Lab& lab, const Shape& s) {
  const std::string name = s.prefix()       ? "prefix balance"
                           : s.cumulative() ? "cumulative balance"
                                            : "balance";
  const std::string forward_name = name + " forward", backward_name = name + " backward";
  if (!lab.wants(forward_name, s.text()) && !lab.wants(backward_name, s.text())) return;
  const std::int64_t bytes = 4 * s.elements();
  std::vector<Tensors> tensors;
  for (int copy = 0; copy < std::min(lab.copies(2 * bytes), 8); ++copy) {
    tensors.emplace_back(s, 100 * static_cast<std::uint64_t>(copy));
  }
  const Tensors& t = tensors[0];
  const Float p(s.results()), d_scores(s.elements()), p_fp32(s.results()), d_fp32(s.elements());
  if (s.cumulative()) {
    solve_cumulative<double>(s, t, p, d_scores);
    solve_cumulative<float>(s, t, p_fp32, d_fp32);
  } else {
    solve<double>(s, t, p, d_scores);
    solve<float>(s, t, p_fp32, d_fp32);
  }
  // Products of a half-step: N^2 for a matrix, for each prefix of `size` on average a third of it.
  const double flops = 2.0 * 2 * s.iterations * s.elements() * (s.prefix() ? s.size / 3.0 : 1);
  Case forward{forward_name, s.text(), 2.0 * static_cast<double>(bytes), flops, 2 * bytes};
  forward.launch = [&](int copy, cudaStream_t stream) {
    launch_balance(tensors[static_cast<std::size_t>(copy) % tensors.size()].problems, stream);
  };
  forward.outputs = {output("p", t.p, p, p_fp32)};
  if (lab.wants(forward_name, s.text())) lab.run(forward);
  Case backward{backward_name, s.text(), 3.0 * static_cast<double>(bytes), 3 * flops, 3 * bytes};
  backward.launch = [&](int copy, cudaStream_t stream) {
    launch_balance_backward(tensors[static_cast<std::size_t>(copy) % tensors.size()].backward,
                            stream);
  };
  backward.outputs = {output("d_scores", t.d_scores, d_scores, d_fp32)};
  if (lab.wants(backward_name, s.text())) lab.run(backward);
}

}  // namespace

void cases(Lab& lab) {
  for (const int size : {2, 8, 16, 32, 64, 128, 256}) {
    run(lab, {64, size, 5, BalanceKind::kWhole});
  }
  for (const int size : {8, 16, 64, 128, 256}) run(lab, {64, size, 5, BalanceKind::kPrefix});
  run(lab, {512, 16, 5, BalanceKind::kPrefix});  // a training step of lmx_base_sinkhorn
  for (const int size : {16, 64, 256}) run(lab, {64, size, 5, BalanceKind::kCumulative});
}

}  // namespace birkhoff::lab
