// Entmax attention of one head (cpu_rows.h), compiled once for each instruction set. The scores of
// kRows queries with all keys stay in scratch, one query in each lane. Newton's method finds the
// thresholds: the norm of the vector max((a - 1) S - t, 0) is a convex decreasing function of t, so
// that steps from below never overshoot. Only keys with a weight in some lane are then multiplied.
#pragma once

#include "attention/kernels/row_normalizer/cpu_terms_body.h"

namespace birkhoff {
namespace {

// Natural logarithm of a positive normal number: x = 2^e m with m in [sqrt(1/2), sqrt(2)), and
// log m = 2 artanh((m - 1) / (m + 1)) by its series. 0 gives a finite number below any other.
template <typename S>
inline Vector<S> log(Vector<S> x) {
  constexpr int kMantissa = sizeof(S) == 4 ? 23 : 52, kBias = sizeof(S) == 4 ? 127 : 1023;
  constexpr int kTerms = sizeof(S) == 4 ? 5 : 11;
  constexpr S kRoot = static_cast<S>(1.4142135623730951), kLn2 = static_cast<S>(0.6931471805599453);
  const Bits<S> bits = reinterpret_cast<Bits<S>>(x);
  constexpr Bit<S> kFraction = (Bit<S>{1} << kMantissa) - 1, kOne = Bit<S>{kBias} << kMantissa;
  auto m = reinterpret_cast<Vector<S>>((bits & kFraction) | kOne);
  Vector<S> e = __builtin_convertvector((bits >> kMantissa) - kBias, Vector<S>);
  e += m > kRoot ? Vector<S>{} + 1 : Vector<S>{};
  m = m > kRoot ? m / 2 : m;
  const Vector<S> y = (m - 1) / (m + 1), square = y * y;
  Vector<S> series{};
  for (int n = kTerms; n >= 0; --n) series = series * square + S{1} / static_cast<S>(2 * n + 1);
  return e * kLn2 + 2 * y * series;
}

template <typename T>
class EntmaxPasses : public HeadTiles<T> {
 public:
  using Tiles = HeadTiles<T>;
  using Tiles::a_t_, Tiles::q_, Tiles::k_, Tiles::v_, Tiles::d_out_, Tiles::d_k_, Tiles::d_v_;
  using Tiles::kInfinity, Tiles::kN, Tiles::row;
  using typename Tiles::S;
  static constexpr int kRows = 32;  // half a tile: twice as many keys fit in the caches

  static std::size_t scratch_bytes(const HeadShape& shape) {
    ScratchLayout layout;
    static constexpr EntmaxHead<T> kNone{};
    EntmaxPasses(shape, kNone, layout);
    return layout.used;
  }

  EntmaxPasses(const HeadShape& shape, const EntmaxHead<T>& head, ScratchLayout& memory)
      : Tiles(shape, head, memory), shape_(shape), head_(head), excess_(head.alpha - 1) {
    for (S** x : {&other_a_t_, &acc_, &rows_, &sums_}) *x = memory.take<S>(this->size_of(kTile));
    const auto keys = static_cast<std::size_t>(whole_tiles(shape.max_keys));
    scores_ = memory.take<S>(keys * kRows);
    for (S** x : {&p_, &g_}) *x = memory.take<S>(kTile * kRows);
    listed_ = memory.take<int>(keys);
  }

  void forward() {
    this->load_rows();
    for_rows([&](const Rows& r) {
      const Vectors threshold = find_thresholds(r);
      for (int i = 0; i < r.count; ++i) head_.threshold[r.first + i] = at(threshold, i);
      const int num_listed = list_weights(r, threshold);
      for (int x = 0; x < kRows * this->columns; ++x) acc_[x] = 0;
      for (int first = 0, count = 0; first < num_listed; first += count) {
        count = listed_of_tile(first, num_listed);
        for (int n = 0; n < count; ++n) {
          const int key = listed_[first + n];
          copy(v_ + row(key), rows_ + row(n));
          for (int i = 0; i < kRows; i += kN) {
            const S* u = scores_ + std::ptrdiff_t{first + n} * kRows + i;
            store(p_ + n * kRows + i, weight_of(load(u)) * factors(r, i, key));
          }
        }
        add_listed(p_, count);
      }
      this->write(acc_, r.count, 1, r.first, head_.out);
    });
  }

  void backward() {
    this->load_rows();
    this->load_gradients();
    for_rows([&](const Rows& r) {
      Vectors threshold{};
      for (int i = 0; i < kRows; ++i) {
        threshold[i / kN][i % kN] = i < r.count ? head_.threshold[r.first + i] : kInfinity;
      }
      fill_scores(r);
      add_gradients(r, list_weights(r, threshold));
    });
    this->write_key_gradients();
  }

 private:
  static constexpr int kVectors = kRows / kN;
  struct Vectors {
    Vector<S> lanes[kVectors];
    Vector<S>& operator[](int i) { return lanes[i]; }
    const Vector<S>& operator[](int i) const { return lanes[i]; }
  };
  static S at(const Vectors& x, int i) { return x[i / kN][i % kN]; }

  // Queries [first, first + count) and the keys that any of them sees. The tile in a_t_ holds their
  // columns from `lane` on.
  struct Rows {
    int first = 0, count = 0, lane = 0;
    int first_key = 0, end_key = 0;
    Bits<S> first_of[kVectors] = {}, end_of[kVectors] = {};
  };

  void copy(const S* from, S* to) const {
    for (int d = 0; d < this->columns; d += kN) store(to + d, load(from + d));
  }

  template <typename F>
  void for_rows(F f) {
    this->for_tiles({q_, head_.num_queries}, [&](int first_query, int num_queries, int) {
      for (int lane = 0; lane < num_queries; lane += kRows) {
        Rows r{.first = first_query + lane,
               .count = min_of(kRows, num_queries - lane),
               .lane = lane,
               .first_key = head_.num_keys};
        for (int i = 0; i < r.count; ++i) {
          const int first = head_.first[r.first + i],
                    end = min_of(head_.end[r.first + i], head_.num_keys);
          r.first_of[i / kN][i % kN] = first;
          r.end_of[i / kN][i % kN] = end;
          if (end <= first) continue;
          r.first_key = min_of(r.first_key, first);
          r.end_key = r.end_key > end ? r.end_key : end;
        }
        r.first_key = min_of(r.first_key, r.end_key) / kTile * kTile;
        f(r);
      }
    });
  }

  // scores[j - first_key][i] = (a - 1) S_ij, -infinity for keys that a query does not see. Returns
  // the maximum of each query.
  Vectors fill_scores(const Rows& r) {
    Vectors top;
    for (Vector<S>& x : top.lanes) x = Vector<S>{} - kInfinity;
    for (int first = r.first_key; first < r.end_key; first += kTile) {
      const int count = min_of(kTile, head_.num_keys - first);
      S* s = scores_ + std::ptrdiff_t{first - r.first_key} * kRows;
      this->multiply(a_t_ + r.lane, kRows, k_ + row(first), count, s, kRows);
      add_terms(head_, static_cast<S>(shape_.scale), r.first, r.count, first, count, s, kRows);
      for (int n = 0; n < min_of(count, r.end_key - first); ++n) {
        const Bits<S> key = Bits<S>{} + (first + n);
        for (int i = 0; i < kVectors; ++i) {
          Vector<S> x = load(s + n * kRows + i * kN) * excess_;
          x = ((key >= r.first_of[i]) & (key < r.end_of[i])) ? x : Vector<S>{} - kInfinity;
          store(s + n * kRows + i * kN, x);
          top[i] = x > top[i] ? x : top[i];
          // NaN reaches the threshold, and with it the whole row.
          top[i] = x != x ? x : top[i];
        }
      }
    }
    return top;
  }

  // max(x, 0)^(1 / (a - 1)), and what its derivative multiplies: max(x, 0)^((2 - a) / (a - 1)).
  Vector<S> weight_of(Vector<S> u) const {
    if (excess_ == 1) return u;
    if (excess_ == S{0.5}) return u * u;
    return power(u, 1 / excess_);
  }
  Vector<S> slope_of(Vector<S> u) const {
    if (excess_ == 1) return u > 0 ? Vector<S>{} + 1 : u;  // NaN and 0 stay
    if (excess_ == S{0.5}) return u;
    return power(u, 1 / excess_ - 1);
  }
  static Vector<S> power(Vector<S> x, S y) {
    return x > 0 ? exp<S>(log<S>(x) * y) : x;  // NaN and 0 stay
  }

  Vectors find_thresholds(const Rows& r) {
    constexpr int kMaxIterations = 40;
    constexpr S kEnough = sizeof(S) == 8 ? static_cast<S>(1e-15) : static_cast<S>(1e-7);
    const Vectors top = fill_scores(r);
    Vectors t;
    for (int i = 0; i < kVectors; ++i) t[i] = top[i] - 1;
    const int num_keys = r.end_key - r.first_key;
    // A lane that has arrived stays, so that a row does not depend on the others.
    Bits<S> moves[kVectors];
    for (Bits<S>& each : moves) each = ~Bits<S>{};
    for (int iteration = 0; iteration < kMaxIterations; ++iteration) {
      bool moved = false;
      for (int i = 0; i < kVectors; ++i) {
        Vector<S> sum{}, slope{};
        for (int n = 0; n < num_keys; ++n) {
          const Vector<S> x = load(scores_ + std::ptrdiff_t{n} * kRows + i * kN) - t[i];
          const Vector<S> u = x > 0 ? x : Vector<S>{}, w = slope_of(u);
          sum += u * w;
          slope += w;
        }
        const Vector<S> step = (power(sum, excess_) - 1) / (slope * power(sum, excess_ - 1));
        // A row that sees no key has t = -infinity and no slope.
        moves[i] &= (slope > 0) & (step > kEnough * (1 + (t[i] > 0 ? t[i] : -t[i])));
        t[i] = moves[i] ? t[i] + step : t[i];
        for (int lane = 0; lane < kN; ++lane) moved |= moves[i][lane] != 0;
      }
      if (!moved) break;
    }
    return t;
  }

  // Moves the keys with a weight in some lane, as u = max(score - t, 0), to the front of scores and
  // their numbers to listed_; returns how many.
  int list_weights(const Rows& r, const Vectors& threshold) {
    int count = 0;
    for (int n = 0; n < r.end_key - r.first_key; ++n) {
      Vectors u;
      Bits<S> found{};
      for (int i = 0; i < kVectors; ++i) {
        const Vector<S> score = load(scores_ + std::ptrdiff_t{n} * kRows + i * kN);
        const Vector<S> x = score - threshold[i];
        u[i] = (x <= 0) | (score == -kInfinity) ? Vector<S>{} : x;  // NaN stays
        found |= u[i] != 0;
      }
      bool any = false;
      for (int lane = 0; lane < kN; ++lane) any |= found[lane] != 0;
      if (!any) continue;
      for (int i = 0; i < kVectors; ++i)
        store(scores_ + std::ptrdiff_t{count} * kRows + i * kN, u[i]);
      listed_[count++] = r.first_key + n;
    }
    return count;
  }

  // How many listed keys from `first` on are of its tile. Sums of a tile are added up separately,
  // so that a row's bits do not depend on what the other rows list.
  int listed_of_tile(int first, int num_listed) const {
    int end = first + 1;
    while (end < num_listed && listed_[end] / kTile == listed_[first] / kTile) ++end;
    return end - first;
  }

  // Dropout's factors of the lanes from i on for a key.
  Vector<S> factors(const Rows& r, int i, int key) const {
    if (shape_.dropout == nullptr) return Vector<S>{} + 1;
    const TileDropout& dropout = *shape_.dropout;
    Vector<S> result{};
    for (int lane = 0; lane < kN; ++lane) {
      const auto element = static_cast<std::uint64_t>(
          head_.first_element + (r.first + i + lane) * dropout.query_stride + key);
      const PhiloxBlock block = philox_block(dropout.key, head_.sample_id, element >> 2);
      if (block.words[element & 3] >> 8 >= dropout.least)
        result[lane] = static_cast<S>(dropout.scale);
    }
    return result;
  }

  void add_gradients(const Rows& r, int num_listed) {
    const S *q = q_ + row(r.first), *d_out = d_out_ + row(r.first);
    const bool nan_in_q = has_nan(q, r.count * this->columns),
               nan_in_d_out = has_nan(d_out, r.count * this->columns);
    if (r.lane == 0) this->transpose_tile(d_out, other_a_t_);
    // The sums over keys, r G / sum r, need all of G.
    Vectors sum_r{}, sum_rg{}, sum_p{}, entropy{};
    each_tile(r, num_listed, [&](int first, int count) {
      for (int n = 0; n < count; ++n) {
        for (int i = 0; i < kVectors; ++i) {
          const Vector<S> u = listed(first + n, i), w = slope_of(u);
          if (head_.d_alpha != nullptr) {
            const Vector<S> p = weight_of(u);
            sum_p[i] += p;
            entropy[i] += entropy_of(p);
          }
          sum_r[i] += w;
          sum_rg[i] += if_listed(u, w * load(g_ + n * kRows + i * kN));
        }
      }
    });
    Vectors mean;
    for (int i = 0; i < kVectors; ++i) mean[i] = sum_r[i] != 0 ? sum_rg[i] / sum_r[i] : Vector<S>{};
    if (head_.d_alpha != nullptr) add_exponent_gradient(r, num_listed, sum_r, sum_p, entropy);
    for (int x = 0; x < kRows * this->columns; ++x) acc_[x] = 0;
    each_tile(r, num_listed, [&](int first, int count) {
      for (int n = 0; n < count; ++n) {
        copy(k_ + row(listed_[first + n]), rows_ + row(n));
        for (int i = 0; i < kVectors; ++i) {
          const Vector<S> u = listed(first + n, i);
          const Vector<S> g = load(g_ + n * kRows + i * kN);
          store(g_ + n * kRows + i * kN, if_listed(u, slope_of(u) * (g - mean[i])));
          store(p_ + n * kRows + i * kN, weight_of(u) * factors(r, i * kN, listed_[first + n]));
        }
      }
      if (head_.d_terms.data != nullptr) write_term_gradients(r, first, count);
      add_listed(g_, count);
      add_to_listed(g_, first, count, q, r.count, nan_in_q, d_k_);
      add_to_listed(p_, first, count, d_out, r.count, nan_in_d_out, d_v_);
    });
    this->write(acc_, r.count, static_cast<S>(shape_.scale), r.first, head_.d_q);
  }

  // From g_, for listed keys of a tile. Keys that a query does not see are among those with 0.
  void write_term_gradients(const Rows& r, int first, int count) const {
    for (int n = 0; n < count; ++n) {
      for (int i = 0; i < r.count; ++i) {
        const S d_s = g_[n * kRows + i];
        if (d_s == 0) continue;
        head_.d_terms.data[(r.first + i) * head_.d_terms.stride + listed_[first + n]] =
            d_s * static_cast<S>(shape_.scale);
      }
    }
  }

  Vector<S> listed(int n, int i) const {
    return load(scores_ + std::ptrdiff_t{n} * kRows + i * kN);
  }

  // x, or 0 where a query has no weight u for the key: G of another query's value may be NaN.
  static Vector<S> if_listed(Vector<S> u, Vector<S> x) { return u != 0 ? x : Vector<S>{}; }

  // Calls f(first, count) for tiles of listed keys; g_ then holds their G.
  template <typename F>
  void each_tile(const Rows& r, int num_listed, F f) {
    for (int first = 0, count = 0; first < num_listed; first += count) {
      count = listed_of_tile(first, num_listed);
      for (int n = 0; n < count; ++n) copy(v_ + row(listed_[first + n]), rows_ + row(n));
      this->multiply(other_a_t_ + r.lane, kRows, rows_, count, g_, kRows);
      if (shape_.dropout != nullptr) {
        for (int n = 0; n < count; ++n) {
          for (int i = 0; i < kRows; i += kN) {
            S* g = g_ + n * kRows + i;
            store(g, load(g) * factors(r, i, listed_[first + n]));
          }
        }
      }
      f(first, count);
    }
  }

  // to[m] (+)= sum_k a_mk b_k for `count` rows of `to` and `depth` rows b; a_mk lies at
  // a[m a_row + k a_depth]. With `nan_in_b`, a product with a_mk = 0 is 0: NaN does not reach
  // queries and keys that have no weight for each other.
  [[gnu::always_inline]] void multiply_weights(const S* a, int a_row, int a_depth, int count,
                                               const S* b, int depth, bool nan_in_b,
                                               bool accumulate, S* to) const {
    if (!nan_in_b) {
      for (int m = 0; m < count; m += kPanel) {
        multiply_panel(a + m * a_row, a_row, a_depth, b, this->columns, depth, to + row(m),
                       this->columns, this->columns, accumulate);
      }
      return;
    }
    for (int m = 0; m < count; ++m) {
      for (int d = 0; d < this->columns; d += kN) {
        Vector<S> sum{};
        for (int k = 0; k < depth; ++k) {
          const S weight = a[m * a_row + k * a_depth];
          if (weight != 0) multiply_add<S>(load(b + row(k) + d), weight, sum);
        }
        S* result = to + row(m) + d;
        store(result, accumulate ? sum + load(result) : sum);
      }
    }
  }

  // acc[i] += sum_n x_t[n][i] rows[n].
  void add_listed(const S* x_t, int count) const {
    multiply_weights(x_t, 1, kRows, kRows, rows_, count, has_nan(rows_, count * this->columns),
                     /*accumulate=*/true, acc_);
  }

  // to[key] += sum_i x_t[n][i] b_i for the listed keys.
  void add_to_listed(const S* x_t, int first, int count, const S* b, int num_queries, bool nan_in_b,
                     S* to) const {
    multiply_weights(x_t, kRows, 1, count, b, num_queries, nan_in_b, /*accumulate=*/false, sums_);
    for (int n = 0; n < count; ++n) {
      S* sum = to + row(listed_[first + n]);
      for (int d = 0; d < this->columns; d += kN) {
        store(sum + d, load(sum + d) + load(sums_ + row(n) + d));
      }
    }
  }

  // -p log p
  static Vector<S> entropy_of(Vector<S> p) { return p > 0 ? -p * log<S>(p) : Vector<S>{}; }

  // Correia et al. 2019, proposition 1, whose tilted distribution is r / sum r. The division by
  // (a - 1)^2 magnifies what a rounded threshold adds to the sum of p, so p is divided by it.
  void add_exponent_gradient(const Rows& r, int num_listed, const Vectors& sum_r,
                             const Vectors& sum_p, const Vectors& entropy) {
    Vectors total{};
    each_tile(r, num_listed, [&](int first, int count) {
      for (int n = 0; n < count; ++n) {
        for (int i = 0; i < kVectors; ++i) {
          const Vector<S> u = listed(first + n, i), p = weight_of(u);
          const Vector<S> share = sum_r[i] != 0 ? slope_of(u) / sum_r[i] : Vector<S>{};
          const Vector<S> whole = sum_p[i] != 0 ? p / sum_p[i] : Vector<S>{};
          const Vector<S> slope = (whole - share) / excess_ + (entropy_of(p) - share * entropy[i]);
          total[i] += slope * load(g_ + n * kRows + i * kN);
        }
      }
    });
    for (int i = 0; i < r.count; ++i) *head_.d_alpha += at(total, i) / static_cast<double>(excess_);
  }

  const HeadShape& shape_;
  const EntmaxHead<T>& head_;
  const S excess_;  // a - 1
  S *other_a_t_, *acc_;
  S* rows_;    // rows of listed keys
  S* sums_;    // their gradients
  S* scores_;  // [keys, kRows]
  S *p_, *g_;  // [kTile, kRows]
  int* listed_;
};

template <typename T>
void entmax_forward(const HeadShape& shape, const EntmaxHead<T>& head, void* scratch) {
  ScratchLayout memory{static_cast<std::byte*>(scratch)};
  EntmaxPasses<T>(shape, head, memory).forward();
}
template <typename T>
void entmax_backward(const HeadShape& shape, const EntmaxHead<T>& head, void* scratch) {
  ScratchLayout memory{static_cast<std::byte*>(scratch)};
  EntmaxPasses<T>(shape, head, memory).backward();
}

}  // namespace
}  // namespace birkhoff
