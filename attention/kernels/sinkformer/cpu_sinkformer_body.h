// The passes of cpu_sinkformer.h, compiled once for each instruction set. Row steps and column
// steps are the same functions with the two sides exchanged.
#pragma once

#include "attention/kernels/sinkformer/cpu_sinkformer.h"
#include "attention/kernels/tile_attention/cpu_head_body.h"

namespace birkhoff {
namespace {

// A step of the balance seen from one side: exp(a . b + of_a + of_b) is its matrix. Null: 0.
template <typename S>
struct Potentials {
  const S *of_a = nullptr, *of_b = nullptr;
};

// W^t times the coefficient of its column or, if `of_query`, of its row.
template <typename S>
struct Term {
  const S *row_potential = nullptr, *column_potential = nullptr, *coefficient = nullptr;
  bool of_query = false;
};

template <typename T>
class SinkformerPasses : public HeadTiles<T> {
 public:
  using Tiles = HeadTiles<T>;
  using Tiles::a_t_, Tiles::q_, Tiles::k_, Tiles::v_, Tiles::d_out_, Tiles::d_k_, Tiles::d_v_;
  using Tiles::kInfinity, Tiles::kN, Tiles::columns, Tiles::row;
  using typename Tiles::S;

  static std::size_t scratch_bytes(const SinkformerShape& shape) {
    ScratchLayout layout;
    static constexpr SinkformerHead<T> kNone{};
    SinkformerPasses(shape, kNone, layout);
    return layout.used;
  }

  SinkformerPasses(const SinkformerShape& shape, const SinkformerHead<T>& head,
                   ScratchLayout& memory)
      : Tiles(shape, head, memory), shape_(shape), head_(head) {
    const int L = whole_tiles(shape.max_queries), K = whole_tiles(shape.max_keys);
    const auto take = [&](std::size_t count) { return memory.take<S>(count); };
    for (S** x : {&other_a_t_, &acc_}) *x = take(this->size_of(kTile));
    for (S** x : {&s_t_, &g_t_}) *x = take(kTile * kTile);
    const auto rows = static_cast<std::size_t>(L), keys = static_cast<std::size_t>(K);
    const std::size_t pairs = static_cast<std::size_t>(shape.half_steps) / 2 + 1;
    for (S** x : {&delta_, &row_work_}) *x = take(rows);
    for (S** x : {&x_, &residual_, &direction_, &image_, &mass_}) *x = take(keys);
    row_coefficients_ = take(rows * pairs);
    column_coefficients_ = take(keys * pairs);
    lane_sums_ = take(keys * kN);
  }

  void forward() {
    this->load_rows();
    const S log_mass = __builtin_log(static_cast<S>(head_.num_queries) / head_.num_keys);
    const S* g = nullptr;
    for (int t = 1; t < shape_.half_steps; t += 2) {
      half_step(queries(), keys(), g, 0, rows_at(t));
      half_step(keys(), queries(), rows_at(t), log_mass, columns_at(t + 1));
      g = columns_at(t + 1);
    }
    attend(g, rows_at(shape_.half_steps));
  }

  void backward() {
    this->load_rows();
    this->load_gradients();
    for (int i = 0; i < head_.num_queries; ++i) {
      delta_[i] = dot_product(d_out_ + row(i), head_.exact_out + std::ptrdiff_t{i} * this->head_dim,
                              this->head_dim);
    }
    int num_terms = 0;
    if (shape_.half_steps > 1 && shape_.gradient != BalanceGradient::kTruncated) {
      num_terms = shape_.gradient == BalanceGradient::kUnrolled ? unroll() : solve();
    }
    finish(num_terms);
  }

 private:
  Side<S> queries() const { return {q_, head_.num_queries}; }
  Side<S> keys() const { return {k_, head_.num_keys}; }
  // f^t and g^t.
  S* rows_at(int t) const {
    return head_.row_potentials + std::ptrdiff_t{t / 2} * shape_.max_queries;
  }
  S* columns_at(int t) const {
    return t == 0 ? nullptr : head_.column_potentials + std::ptrdiff_t{t / 2 - 1} * shape_.max_keys;
  }

  // Turns s_t into exp(s_t + potential - max) and adds these to sum. Rows that fill a panel become
  // 0. If max grows, the factor of what was summed before is stored.
  void exponentials(int count, int lanes, const S* potential, S* max, S* sum, S* factor) const {
    const int padded = round_up(count, kPanel);
    for (int i = 0; i < lanes; i += kN) {
      const Vector<S> old_max = load(max + i);
      Vector<S> top = old_max;
      for (int j = 0; j < count; ++j) {
        const Vector<S> s = load(s_t_ + j * kTile + i) + at_or_zero(potential, j);
        store(s_t_ + j * kTile + i, s);
        top = s > top ? s : top;
      }
      for (int j = count; j < padded; ++j) store(s_t_ + j * kTile + i, Vector<S>{} - kInfinity);
      Vector<S> total{};
      for (int j = 0; j < padded; j += kPanel) {
        for (int n = j; n < j + kPanel; ++n) {
          const Vector<S> p = exp<S>(load(s_t_ + n * kTile + i) - top);
          store(s_t_ + n * kTile + i, p);
          total += p;
        }
      }
      const Vector<S> scaled = exp<S>(old_max - top);
      store(factor + i, scaled);
      store(sum + i, load(sum + i) * scaled + total);
      store(max + i, top);
    }
  }

  static void start(S* max, S* sum) {
    for (int i = 0; i < kTile; ++i) {
      max[i] = -kInfinity;
      sum[i] = 0;
    }
  }

  // of_a_i = log_mass - log sum_j exp(a_i . b_j + of_b_j).
  void half_step(const Side<S>& a, const Side<S>& b, const S* of_b, S log_mass, S* of_a) const {
    this->for_tiles(a, [&](int first_a, int count_a, int lanes) {
      S max[kTile], sum[kTile], factor[kTile];
      start(max, sum);
      for (int first = 0; first < b.count; first += kTile) {
        const int count = min_of(kTile, b.count - first);
        this->multiply(a_t_, lanes, b.rows + row(first), count, s_t_);
        exponentials(count, lanes, of_b == nullptr ? nullptr : of_b + first, max, sum, factor);
      }
      for (int i = 0; i < count_a; ++i) {
        of_a[first_a + i] = log_mass - (max[i] + static_cast<S>(__builtin_log(sum[i])));
      }
    });
  }

  // The last half-step f and out.
  void attend(const S* g, S* f) {
    this->for_tiles(queries(), [&](int first_query, int num_queries, int lanes) {
      S max[kTile], sum[kTile], factor[kTile];
      start(max, sum);
      for (int first = 0; first < keys().count; first += kTile) {
        const int count = min_of(kTile, keys().count - first);
        this->multiply(a_t_, lanes, k_ + row(first), count, s_t_);
        exponentials(count, lanes, g == nullptr ? nullptr : g + first, max, sum, factor);
        if (const Bit<S>* kept = this->draw(first_query, lanes, first, count)) {
          for (int j = 0; j < count; ++j) {
            for (int i = 0; i < lanes; i += kN) {
              S* p = s_t_ + j * kTile + i;
              store(p, keep<S>(load(p), kept, j, i));
            }
          }
        }
        for (int i = 0; first > 0 && i < num_queries; ++i) {
          if (factor[i] == 1) continue;
          for (int d = 0; d < columns; ++d) acc_[row(i) + d] *= factor[i];
        }
        this->add_to_queries(s_t_, num_queries, count, v_ + row(first), first > 0, acc_);
      }
      for (int i = 0; i < num_queries; ++i) {
        f[first_query + i] = -(max[i] + static_cast<S>(__builtin_log(sum[i])));
        const S scale = this->kept_scale() / sum[i];
        T* out = head_.out.data + (first_query + i) * head_.out.stride;
        S* exact = head_.exact_out;
        if (exact != nullptr) exact += std::ptrdiff_t{first_query + i} * this->head_dim;
        for (int d = 0; d < this->head_dim; ++d) {
          const S x = acc_[row(i) + d] * scale;
          out[d] = from_sum<T>(x);
          if (exact != nullptr) exact[d] = x;
        }
      }
    });
  }

  // y_i = sum_j exp(a_i . b_j + of_a_i + of_b_j) x_j.
  void apply(const Side<S>& a, const Side<S>& b, const Potentials<S>& of, const S* x, S* y) const {
    this->for_tiles(a, [&](int first_a, int count_a, int lanes) {
      S sum[kTile] = {}, of_a[kTile] = {};
      for (int i = 0; i < count_a; ++i) of_a[i] = at_or_zero(of.of_a, first_a + i);
      for (int first = 0; first < b.count; first += kTile) {
        const int count = min_of(kTile, b.count - first);
        this->multiply(a_t_, lanes, b.rows + row(first), count, s_t_);
        for (int i = 0; i < lanes; i += kN) {
          const Vector<S> own = load(of_a + i);
          Vector<S> total{};
          for (int j = 0; j < count; ++j) {
            const Vector<S> s = load(s_t_ + j * kTile + i);
            total += exp<S>(s + (own + at_or_zero(of.of_b, first + j))) * x[first + j];
          }
          store(sum + i, load(sum + i) + total);
        }
      }
      for (int i = 0; i < count_a; ++i) y[first_a + i] = sum[i];
    });
  }

  // d_g = sum_i P_ij (G_ij - delta_i), of the last column step.
  void gradient_of_columns(S* d_g) const {
    const S *f = rows_at(shape_.half_steps), *g = columns_at(shape_.half_steps - 1);
    for (int x = 0; x < head_.num_keys * kN; ++x) lane_sums_[x] = 0;
    this->for_tiles(queries(), [&](int first_query, int num_queries, int lanes) {
      this->transpose_tile(d_out_ + row(first_query), other_a_t_);
      S of_query[kTile], delta[kTile];
      read_queries(first_query, num_queries, f, of_query, delta);
      for (int first = 0; first < keys().count; first += kTile) {
        const int count = min_of(kTile, keys().count - first);
        this->multiply(a_t_, lanes, k_ + row(first), count, s_t_);
        this->multiply(other_a_t_, lanes, v_ + row(first), count, g_t_);
        const Bit<S>* kept = this->draw(first_query, lanes, first, count);
        const Vector<S> kept_by = Vector<S>{} + this->kept_scale();
        for (int j = 0; j < count; ++j) {
          S* to = lane_sums_ + std::ptrdiff_t{first + j} * kN;
          Vector<S> total = load(to);
          for (int i = 0; i < lanes; i += kN) {
            const Vector<S> s = load(s_t_ + j * kTile + i);
            const Vector<S> p = exp<S>(s + (load(of_query + i) + g[first + j]));
            const Vector<S> d_p = load(g_t_ + j * kTile + i) * keep<S>(kept_by, kept, j, i);
            total += p * (d_p - load(delta + i));
          }
          store(to, total);
        }
      }
    });
    for (int j = 0; j < head_.num_keys; ++j) {
      S sum = 0;
      for (int lane = 0; lane < kN; ++lane) sum += lane_sums_[std::ptrdiff_t{j} * kN + lane];
      d_g[j] = sum;
    }
  }

  // Of a tile of queries: potentials, -infinity past the end so that p is 0 there, and delta.
  void read_queries(int first, int count, const S* f, S* of_query, S* delta) const {
    for (int i = 0; i < kTile; ++i) {
      of_query[i] = i < count ? f[first + i] : -kInfinity;
      delta[i] = i < count ? delta_[first + i] : 0;
    }
  }

  // Fills terms_ from the last half-step but one to the first; returns how many.
  int unroll() {
    const int last = shape_.half_steps - 1;
    const S inverse_mass = static_cast<S>(head_.num_keys) / head_.num_queries;
    S *of_columns = column_coefficients_, *of_rows = row_coefficients_;
    gradient_of_columns(of_columns);
    for (int t = last; t >= 2; t -= 2) {
      const S *f = rows_at(t - 1), *g = columns_at(t), *earlier = columns_at(t - 2);
      for (int j = 0; j < head_.num_keys; ++j) of_columns[j] *= inverse_mass;
      terms_[last - t] = {f, g, of_columns, /*of_query=*/false};
      apply(queries(), keys(), {f, g}, of_columns, of_rows);
      for (int i = 0; i < head_.num_queries; ++i) of_rows[i] = -of_rows[i];
      terms_[last - t + 1] = {f, earlier, of_rows, /*of_query=*/true};
      if (t == 2) break;
      of_columns += whole_tiles(shape_.max_keys);
      apply(keys(), queries(), {earlier, f}, of_rows, of_columns);
      for (int j = 0; j < head_.num_keys; ++j) of_columns[j] = -of_columns[j];
      of_rows += whole_tiles(shape_.max_queries);
    }
    return last;
  }

  // y = (diag(mass) - P^T P) x.
  void apply_laplacian(const Potentials<S>& of, const S* x, S* y) {
    apply(queries(), keys(), of, x, row_work_);
    apply(keys(), queries(), {of.of_b, of.of_a}, row_work_, y);
    for (int j = 0; j < head_.num_keys; ++j) y[j] = mass_[j] * x[j] - y[j];
  }
  double dot(const S* x, const S* y) const {
    double sum = 0;
    for (int j = 0; j < head_.num_keys; ++j) sum += static_cast<double>(x[j]) * y[j];
    return sum;
  }

  // Conjugate gradients for the implicit gradient. The matrix is positive semidefinite, and the
  // right side is orthogonal to its null vector 1.
  int solve() {
    constexpr int kMaxIterations = 100;
    constexpr double kTolerance = sizeof(S) == 8 ? 1e-14 : 1e-7;  // of the residual's norm
    const int m = head_.num_keys;
    const Potentials<S> of{rows_at(shape_.half_steps), columns_at(shape_.half_steps - 1)};
    for (int i = 0; i < head_.num_queries; ++i) row_work_[i] = 1;
    apply(keys(), queries(), {of.of_b, of.of_a}, row_work_, mass_);
    gradient_of_columns(residual_);
    for (int j = 0; j < m; ++j) {
      x_[j] = 0;
      direction_[j] = residual_[j];
    }
    double square = dot(residual_, residual_);
    const double enough = square * kTolerance * kTolerance;
    for (int iteration = 0; iteration < kMaxIterations && square > enough; ++iteration) {
      apply_laplacian(of, direction_, image_);
      const double curvature = dot(direction_, image_);
      if (!(curvature > 0)) break;
      const auto step = static_cast<S>(square / curvature);
      for (int j = 0; j < m; ++j) {
        x_[j] += step * direction_[j];
        residual_[j] -= step * image_[j];
      }
      const double next = dot(residual_, residual_);
      const auto ratio = static_cast<S>(next / square);
      for (int j = 0; j < m; ++j) direction_[j] = residual_[j] + ratio * direction_[j];
      square = next;
    }
    apply(queries(), keys(), of, x_, row_coefficients_);
    for (int i = 0; i < head_.num_queries; ++i) row_coefficients_[i] = -row_coefficients_[i];
    terms_[0] = {of.of_a, of.of_b, x_, /*of_query=*/false};
    terms_[1] = {of.of_a, of.of_b, row_coefficients_, /*of_query=*/true};
    return 2;
  }

  // p_t (in s_t) and d_s_t (in g_t) of a tile from its products.
  void tile_gradients(int first_query, int num_queries, int lanes, int first_key, int num_keys,
                      int num_terms) const {
    const S *f = rows_at(shape_.half_steps), *g = columns_at(shape_.half_steps - 1);
    const Bit<S>* kept = this->draw(first_query, lanes, first_key, num_keys);
    const Vector<S> kept_by = Vector<S>{} + this->kept_scale();
    S of_query[kTile], delta[kTile];
    read_queries(first_query, num_queries, f, of_query, delta);
    for (int i = 0; i < lanes; i += kN) {
      const Vector<S> own = load(of_query + i), delta_i = load(delta + i);
      const bool whole = i + kN <= num_queries;
      for (int j = 0; j < num_keys; ++j) {
        S *s_ij = s_t_ + j * kTile + i, *g_ij = g_t_ + j * kTile + i;
        const Vector<S> s = load(s_ij);
        const Vector<S> p = exp<S>(s + (own + at_or_zero(g, first_key + j)));
        const Vector<S> factor = keep<S>(kept_by, kept, j, i);
        Vector<S> d_s = p * (load(g_ij) * factor - delta_i);
        for (int t = 0; t < num_terms; ++t) {
          const Term<S>& term = terms_[t];
          Vector<S> potential, coefficient;
          if (whole) {
            potential = load(term.row_potential + first_query + i);
          } else {
            potential = Vector<S>{} - kInfinity;
            for (int n = 0; i + n < num_queries; ++n) {
              potential[n] = term.row_potential[first_query + i + n];
            }
          }
          if (term.of_query) {
            coefficient = load(term.coefficient + first_query + i);
          } else {
            coefficient = Vector<S>{} + term.coefficient[first_key + j];
          }
          d_s -= exp<S>(s + (potential + at_or_zero(term.column_potential, first_key + j))) *
                 coefficient;
        }
        store(s_ij, p * factor);
        store(g_ij, d_s);
      }
    }
  }

  // The gradients of q, k and v.
  void finish(int num_terms) {
    this->for_tiles(queries(), [&](int first_query, int num_queries, int lanes) {
      const S *q = q_ + row(first_query), *d_out = d_out_ + row(first_query);
      this->transpose_tile(d_out, other_a_t_);
      for (int first = 0; first < head_.num_keys; first += kTile) {
        const int count = min_of(kTile, head_.num_keys - first);
        const std::ptrdiff_t at = row(first);
        this->multiply(a_t_, lanes, k_ + at, count, s_t_);
        this->multiply(other_a_t_, lanes, v_ + at, count, g_t_);
        tile_gradients(first_query, num_queries, lanes, first, count, num_terms);
        this->add_to_keys(s_t_, count, d_out, num_queries, d_v_ + at);
        this->add_to_keys(g_t_, count, q, num_queries, d_k_ + at);
        this->add_to_queries(g_t_, num_queries, count, k_ + at, first > 0, acc_);
      }
      this->write(acc_, num_queries, static_cast<S>(shape_.scale), first_query, head_.d_q);
    });
    this->write_key_gradients();
  }

  const SinkformerShape& shape_;
  const SinkformerHead<T>& head_;
  S *other_a_t_, *acc_, *s_t_, *g_t_;
  S *delta_, *row_coefficients_, *row_work_, *column_coefficients_;
  S *x_, *residual_, *direction_, *image_, *mass_;  // of solve()
  S* lane_sums_;
  Term<S> terms_[kMaxHalfSteps];
};

template <typename T>
void forward_head(const SinkformerShape& shape, const SinkformerHead<T>& head, void* scratch) {
  ScratchLayout memory{static_cast<std::byte*>(scratch)};
  SinkformerPasses<T>(shape, head, memory).forward();
}
template <typename T>
void backward_head(const SinkformerShape& shape, const SinkformerHead<T>& head, void* scratch) {
  ScratchLayout memory{static_cast<std::byte*>(scratch)};
  SinkformerPasses<T>(shape, head, memory).backward();
}

template <typename T>
constexpr SinkformerKernels<T> kSinkformerKernels{&SinkformerPasses<T>::scratch_bytes,
                                                  &forward_head<T>, &backward_head<T>};

}  // namespace
}  // namespace birkhoff
