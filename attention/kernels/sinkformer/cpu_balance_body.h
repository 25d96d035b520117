// The half-steps and the outputs of cpu_sinkformer.h, compiled once for each instruction set. Row
// steps and column steps are the same functions with the two sides exchanged.
#pragma once

#include "attention/kernels/sinkformer/cpu_cached_matrix.h"
#include "attention/kernels/sinkformer/cpu_sinkformer.h"
#include "attention/kernels/tile_attention/cpu_head_body.h"

namespace birkhoff {
namespace {

template <typename T>
class SinkformerBalance : public HeadTiles<T> {
 public:
  using Tiles = HeadTiles<T>;
  using Tiles::a_t_, Tiles::q_, Tiles::k_, Tiles::v_;
  using Tiles::kInfinity, Tiles::kN, Tiles::columns, Tiles::row;
  using typename Tiles::S;
  using Matrix = CachedMatrix<S>;

  SinkformerBalance(const SinkformerShape& shape, const SinkformerHead<T>& head,
                    ScratchLayout& memory)
      : Tiles(shape, head, memory),
        shape_(shape),
        head_(head),
        caches_(shape.half_steps > 1 &&
                Matrix::bytes(head.num_queries, head.num_keys) <= shape.max_cached_bytes) {
    const int L = whole_tiles(shape.max_queries), K = whole_tiles(shape.max_keys);
    const auto rows = static_cast<std::size_t>(L), keys = static_cast<std::size_t>(K);
    acc_ = memory.take<S>(this->size_of(kTile));
    s_t_ = memory.take<S>(kTile * kTile);
    for (S** x : {&row_base_, &row_work_}) *x = memory.take<S>(rows);
    column_work_ = memory.take<S>(keys);
    S* lane_sums = memory.take<S>(keys * kN);
    const std::size_t wanted = shape.half_steps > 1 ? Matrix::bytes(L, K) : 0,
                      most = wanted < shape.max_cached_bytes ? wanted : shape.max_cached_bytes;
    S* elements = memory.take<S>(most / sizeof(S));
    matrix_ = Matrix(elements, lane_sums, head.num_queries, head.num_keys);
  }

  void forward() {
    this->load_rows();
    if (caches_ && forward_in_cache()) return;
    const S log_mass = __builtin_log(static_cast<S>(head_.num_queries) / head_.num_keys);
    const S* g = nullptr;
    for (int t = 1; t < shape_.half_steps; t += 2) {
      half_step(queries(), keys(), g, 0, rows_at(t));
      half_step(keys(), queries(), rows_at(t), log_mass, columns_at(t + 1));
      g = columns_at(t + 1);
    }
    attend(g, rows_at(shape_.half_steps));
  }

 protected:
  // Products of weights with factors e^x, |x| at most this, lose no weight that counts.
  static constexpr S kLargestExponent = 30;

  static bool is_small(S x) { return x <= kLargestExponent && x >= -kLargestExponent; }

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
        sum[i] = 1 / sum[i];
      }
      write_outputs(first_query, num_queries, sum);
    });
  }

  // out_i = scale_i acc_i.
  void write_outputs(int first_query, int num_queries, const S* scale) const {
    for (int i = 0; i < num_queries; ++i) {
      T* out = head_.out.data + (first_query + i) * head_.out.stride;
      S* exact = head_.exact_out;
      if (exact != nullptr) exact += std::ptrdiff_t{first_query + i} * this->head_dim;
      for (int d = 0; d < this->head_dim; ++d) {
        const S x = acc_[row(i) + d] * (this->kept_scale() * scale[i]);
        out[d] = from_sum<T>(x);
        if (exact != nullptr) exact[d] = x;
      }
    }
  }

  // The cached matrix becomes exp(s - max_j s), and base_i = -max_j s_ij.
  void fill_weights(S* base) const {
    this->for_tiles(queries(), [&](int first_query, int, int) {
      Vector<S> top[kTile / kN];
      for (Vector<S>& each : top) each = Vector<S>{} - kInfinity;
      each_tile(keys(), [&](int first, int count) {
        S* m = matrix_.tile(first_query, first);
        this->multiply(a_t_, kTile, k_ + row(first), count, m);
        for (int j = 0; j < count; ++j) {
          for (int i = 0; i < kTile / kN; ++i) {
            const Vector<S> s = load(m + j * kTile + i * kN);
            top[i] = s > top[i] ? s : top[i];
          }
        }
      });
      for (int i = 0; i < kTile / kN; ++i) store(base + first_query + i * kN, -top[i]);
      each_tile(keys(), [&](int first, int count) {
        S* m = matrix_.tile(first_query, first);
        for (int j = 0; j < count; ++j) {
          for (int i = 0; i < kTile / kN; ++i) {
            S* element = m + j * kTile + i * kN;
            store(element, exp<S>(load(element) - top[i]));
          }
        }
      });
    });
  }

  // All half-steps and out, by factors of the cached matrix's rows and columns. Returns false if
  // these become so large or small, or NaN, that logarithms are needed.
  bool forward_in_cache() {
    S *base = row_base_, *u = row_work_, *v = column_work_;
    fill_weights(base);
    for (int j = 0; j < head_.num_keys; ++j) v[j] = 1;
    const S mass = static_cast<S>(head_.num_queries) / head_.num_keys;
    for (int t = 1;; t += 2) {
      matrix_.times(v, u);
      for (int i = 0; i < head_.num_queries; ++i) {
        rows_at(t)[i] = base[i] - static_cast<S>(__builtin_log(u[i]));
        u[i] = 1 / u[i];
      }
      for (int i = head_.num_queries; i < whole_tiles(head_.num_queries); ++i) u[i] = 0;
      if (t == shape_.half_steps) break;
      matrix_.transposed_times(u, v);
      for (int j = 0; j < head_.num_keys; ++j) {
        v[j] = mass / v[j];
        columns_at(t + 1)[j] = static_cast<S>(__builtin_log(v[j]));
        if (!is_small(columns_at(t + 1)[j])) return false;
      }
    }
    each_tile(queries(), [&](int first_query, int num_queries) {
      const int lanes = round_up(num_queries, kN);
      each_tile(keys(), [&](int first, int count) {
        const S* m = matrix_.tile(first_query, first);
        const Bit<S>* kept = this->draw(first_query, lanes, first, count);
        for (int j = 0; j < count; ++j) {
          for (int i = 0; i < lanes; i += kN) {
            const Vector<S> p = load(m + j * kTile + i) * v[first + j];
            store(s_t_ + j * kTile + i, keep<S>(p, kept, j, i));
          }
        }
        this->add_to_queries(s_t_, num_queries, count, v_ + row(first), first > 0, acc_);
      });
      write_outputs(first_query, num_queries, u + first_query);
    });
    return true;
  }

  template <typename F>
  static void each_tile(const Side<S>& side, F f) {
    for (int first = 0; first < side.count; first += kTile) {
      f(first, min_of(kTile, side.count - first));
    }
  }

  const SinkformerShape& shape_;
  const SinkformerHead<T>& head_;
  const bool caches_;  // the matrix of the head fits in scratch, and is used again
  S *acc_, *s_t_;
  S *row_base_, *row_work_, *column_work_;
  Matrix matrix_;
};

}  // namespace
}  // namespace birkhoff
