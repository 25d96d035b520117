// The gradients of cpu_sinkformer.h, compiled once for each instruction set.
#pragma once

#include "attention/kernels/sinkformer/cpu_balance_body.h"

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
class SinkformerPasses : public SinkformerBalance<T> {
 public:
  using Balance = SinkformerBalance<T>;
  using Balance::a_t_, Balance::q_, Balance::k_, Balance::v_, Balance::d_out_, Balance::d_k_,
      Balance::d_v_, Balance::acc_, Balance::s_t_;
  using Balance::caches_, Balance::matrix_, Balance::row_work_, Balance::shape_, Balance::head_;
  using Balance::keys, Balance::queries, Balance::rows_at, Balance::columns_at;
  using Balance::kInfinity, Balance::kN, Balance::row;
  using typename Balance::S;

  static std::size_t scratch_bytes(const SinkformerShape& shape) {
    ScratchLayout layout;
    static constexpr SinkformerHead<T> kNone{};
    SinkformerPasses(shape, kNone, layout);
    return layout.used;
  }

  SinkformerPasses(const SinkformerShape& shape, const SinkformerHead<T>& head,
                   ScratchLayout& memory)
      : Balance(shape, head, memory) {
    const auto num_rows = static_cast<std::size_t>(whole_tiles(shape.max_queries)),
               num_columns = static_cast<std::size_t>(whole_tiles(shape.max_keys));
    const auto take = [&](std::size_t count) { return memory.take<S>(count); };
    const auto half_steps = static_cast<std::size_t>(shape.half_steps);
    other_a_t_ = take(this->size_of(kTile));
    g_t_ = take(kTile * kTile);
    delta_ = take(num_rows);
    factored_ = take(num_rows > num_columns ? num_rows : num_columns);
    for (S** x : {&x_, &residual_, &direction_, &image_, &mass_}) *x = take(num_columns);
    row_coefficients_ = take(num_rows * (half_steps / 2 + 1));
    column_coefficients_ = take(num_columns * (half_steps / 2 + 1));
    row_factors_ = take(num_rows * (half_steps - 1));
    column_factors_ = take(num_columns * (half_steps - 1));
  }

  void backward() {
    this->load_rows();
    this->load_gradients();
    for (int i = 0; i < head_.num_queries; ++i) {
      delta_[i] = dot_product(d_out_ + row(i), head_.exact_out + std::ptrdiff_t{i} * this->head_dim,
                              this->head_dim);
    }
    near_ = potentials_are_near();
    int num_terms = 0;
    if (shape_.half_steps > 1 && shape_.gradient != BalanceGradient::kTruncated) {
      num_terms = shape_.gradient == BalanceGradient::kUnrolled ? unroll() : solve();
    }
    finish(num_terms);
  }

 private:
  // Whether no potential is far from its side's last one.
  bool potentials_are_near() const {
    const S *f = rows_at(shape_.half_steps), *g = columns_at(shape_.half_steps - 1);
    for (int t = 1; t <= shape_.half_steps; t += 2) {
      for (int i = 0; i < head_.num_queries; ++i) {
        if (!this->is_small(rows_at(t)[i] - f[i])) return false;
      }
      for (int j = 0; j < head_.num_keys; ++j) {
        if (!this->is_small(at_or_zero(columns_at(t - 1), j) - at_or_zero(g, j))) return false;
      }
    }
    return true;
  }

  // y_i = sum_j exp(a_i . b_j + of_a_i + of_b_j) x_j.
  void apply(const Side<S>& a, const Side<S>& b, const Potentials<S>& of, const S* x, S* y) const {
    if (is_cached_) return apply_in_cache(a, b, of, x, y);
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

  void apply_in_cache(const Side<S>& a, const Side<S>& b, const Potentials<S>& of, const S* x,
                      S* y) const {
    const bool rows = a.rows == q_;
    const S *f = rows_at(shape_.half_steps), *g = columns_at(shape_.half_steps - 1);
    const S *last_a = rows ? f : g, *last_b = rows ? g : f;
    for (int j = 0; j < b.count; ++j) {
      factored_[j] = x[j] * static_cast<S>(__builtin_exp(at_or_zero(of.of_b, j) - last_b[j]));
    }
    for (int j = b.count; j < whole_tiles(b.count); ++j) factored_[j] = 0;
    rows ? matrix_.times(factored_, y) : matrix_.transposed_times(factored_, y);
    for (int i = 0; i < a.count; ++i) {
      y[i] *= static_cast<S>(__builtin_exp(at_or_zero(of.of_a, i) - last_a[i]));
    }
  }

  // d_g = sum_i P_ij (G_ij - delta_i), of the last column step. Caches P if it fits.
  void gradient_of_columns(S* d_g) {
    const S *f = rows_at(shape_.half_steps), *g = columns_at(shape_.half_steps - 1);
    const bool caches = caches_ && near_;
    matrix_.clear_lanes();
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
        S* p_t = caches ? matrix_.tile(first_query, first) : s_t_;
        for (int j = 0; j < count; ++j) {
          Vector<S> total{};
          for (int i = 0; i < lanes; i += kN) {
            const Vector<S> s = load(s_t_ + j * kTile + i);
            const Vector<S> p = exp<S>(s + (load(of_query + i) + g[first + j]));
            const Vector<S> d_p = load(g_t_ + j * kTile + i) * keep<S>(kept_by, kept, j, i);
            total += p * (d_p - load(delta + i));
            store(p_t + j * kTile + i, p);
          }
          for (int i = lanes; i < kTile; i += kN) store(p_t + j * kTile + i, Vector<S>{});
          matrix_.add_to_lanes(first + j, total);
        }
      }
    });
    matrix_.add_lanes(d_g);
    is_cached_ = caches;
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
    constexpr double kLeastCurvature = sizeof(S) == 8 ? 1e-14 : 1e-6;
    const int m = head_.num_keys;
    const Potentials<S> of{rows_at(shape_.half_steps), columns_at(shape_.half_steps - 1)};
    gradient_of_columns(residual_);
    for (int i = 0; i < head_.num_queries; ++i) row_work_[i] = 1;
    apply(keys(), queries(), {of.of_b, of.of_a}, row_work_, mass_);
    for (int j = 0; j < m; ++j) {
      x_[j] = 0;
      direction_[j] = residual_[j];
    }
    double square = dot(residual_, residual_);
    const double enough = square * kTolerance * kTolerance;
    for (int iteration = 0; iteration < kMaxIterations && square > enough; ++iteration) {
      apply_laplacian(of, direction_, image_);
      const double curvature = dot(direction_, image_);
      // What rounding has left of the null vector in the residual is never solved. Once the
      // direction is little else, its curvature is rounding, too, and the step would be arbitrary.
      double largest = 0;  // the curvature without cancellation
      for (int j = 0; j < m; ++j) {
        largest += static_cast<double>(mass_[j]) * direction_[j] * direction_[j];
      }
      if (!(curvature > kLeastCurvature * largest)) break;
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
    const S* cached = is_cached_ ? matrix_.tile(first_query, first_key) : nullptr;
    S of_query[kTile], delta[kTile];
    read_queries(first_query, num_queries, f, of_query, delta);
    for (int i = 0; i < lanes; i += kN) {
      const Vector<S> own = load(of_query + i), delta_i = load(delta + i);
      for (int j = 0; j < num_keys; ++j) {
        S *s_ij = s_t_ + j * kTile + i, *g_ij = g_t_ + j * kTile + i;
        const Vector<S> p = cached != nullptr
                                ? load(cached + j * kTile + i)
                                : exp<S>(load(s_ij) + (own + at_or_zero(g, first_key + j)));
        const Vector<S> factor = keep<S>(kept_by, kept, j, i);
        Vector<S> d_s;
        if (near_) {
          Vector<S> mean = delta_i;
          for (int t = 0; t < num_terms; ++t) {
            multiply_add<S>(load(row_factors(t) + first_query + i),
                            column_factors(t)[first_key + j], mean);
          }
          d_s = p * (load(g_ij) * factor - mean);
        } else {
          d_s = p * (load(g_ij) * factor - delta_i);
          for (int t = 0; t < num_terms; ++t) {
            d_s -=
                far_weight(terms_[t], load(s_ij), first_query + i, num_queries - i, first_key + j);
          }
        }
        store(s_ij, p * factor);
        store(g_ij, d_s);
      }
    }
  }

  // W of a term from scores of `count` queries, times its coefficients.
  Vector<S> far_weight(const Term<S>& term, Vector<S> s, int query, int count, int key) const {
    Vector<S> potential, coefficient;
    if (count >= kN) {
      potential = load(term.row_potential + query);
    } else {
      potential = Vector<S>{} - kInfinity;
      for (int n = 0; n < count; ++n) potential[n] = term.row_potential[query + n];
    }
    if (term.of_query) {
      coefficient = load(term.coefficient + query);
    } else {
      coefficient = Vector<S>{} + term.coefficient[key];
    }
    return exp<S>(s + (potential + at_or_zero(term.column_potential, key))) * coefficient;
  }

  // W of term t times its coefficients is P times these factors of its rows and columns.
  S* row_factors(int t) const {
    return row_factors_ + std::ptrdiff_t{t} * whole_tiles(shape_.max_queries);
  }
  S* column_factors(int t) const {
    return column_factors_ + std::ptrdiff_t{t} * whole_tiles(shape_.max_keys);
  }
  void find_factors(int num_terms) const {
    const S *f = rows_at(shape_.half_steps), *g = columns_at(shape_.half_steps - 1);
    for (int t = 0; t < num_terms; ++t) {
      const Term<S>& term = terms_[t];
      S *of_row = row_factors(t), *of_column = column_factors(t);
      for (int i = 0; i < head_.num_queries; ++i) {
        of_row[i] = static_cast<S>(__builtin_exp(term.row_potential[i] - f[i]));
        if (term.of_query) of_row[i] *= term.coefficient[i];
      }
      for (int i = head_.num_queries; i < whole_tiles(head_.num_queries); ++i) of_row[i] = 0;
      for (int j = 0; j < head_.num_keys; ++j) {
        of_column[j] = static_cast<S>(__builtin_exp(at_or_zero(term.column_potential, j) - g[j]));
        if (!term.of_query) of_column[j] *= term.coefficient[j];
      }
    }
  }

  // The gradients of q, k and v.
  void finish(int num_terms) {
    if (near_) find_factors(num_terms);
    this->for_tiles(queries(), [&](int first_query, int num_queries, int lanes) {
      const S *q = q_ + row(first_query), *d_out = d_out_ + row(first_query);
      this->transpose_tile(d_out, other_a_t_);
      for (int first = 0; first < head_.num_keys; first += kTile) {
        const int count = min_of(kTile, head_.num_keys - first);
        const std::ptrdiff_t at = row(first);
        if (!is_cached_) this->multiply(a_t_, lanes, k_ + at, count, s_t_);
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

  bool near_ = false;       // potentials_are_near()
  bool is_cached_ = false;  // matrix_ is P
  S *other_a_t_, *g_t_;
  S *delta_, *factored_;
  S *row_coefficients_, *column_coefficients_;
  S *row_factors_, *column_factors_;
  S *x_, *residual_, *direction_, *image_, *mass_;  // of solve()
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
