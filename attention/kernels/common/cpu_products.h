// Copies of rows in scratch, and products of small matrices there, for the tile kernels, block
// mixing and the prefix balance. Included by files that are compiled with different flags from the
// rest: nothing here has external linkage.
#pragma once

#include "attention/kernels/common/cpu_vector.h"
#include "attention/kernels/common/number_types.h"

namespace birkhoff {
namespace {

constexpr int kPanel = 8;  // rows of a panel; tiles are padded with zeros to a multiple of it

inline int min_of(int a, int b) { return a < b ? a : b; }
inline int round_up(int x, int step) { return (x + step - 1) / step * step; }
inline int round_down(int x, int step) { return x / step * step; }

// Whether products of T take pairs of neighboring elements.
template <typename T>
constexpr bool kTakesPairs = kNumbers<Operand<T>> > 1;
// Columns of scratch for rows of `head_dim` elements: whole vectors, whatever their width.
template <typename T>
inline int padded_columns(int head_dim) {
  return round_up(head_dim, kNumbers<Operand<T>> * 64 / static_cast<int>(sizeof(Operand<T>)));
}

// The way a product sums over its depth.
enum class Summation {
  kAtOnce,
  kInParts,  // kPart operands each, summed separately, which rounds less
};
template <typename E>
constexpr int kPart = 16 * kNumbers<E>;

// sum += a b for kRows rows and kVectors vectors of columns. Strides and depth count operands.
template <int kRows, int kVectors, typename E, typename V>
inline void add_products(const E* a, std::ptrdiff_t a_row, std::ptrdiff_t a_depth, const E* b,
                         std::ptrdiff_t b_depth, int depth, V (&sum)[kRows][kVectors]) {
  for (int k = 0; k < depth; ++k) {
    Vector<E> b_k[kVectors];
    for (int n = 0; n < kVectors; ++n) b_k[n] = in_register(load(b + k * b_depth + n * kLanes<E>));
    for (int m = 0; m < kRows; ++m) {
      E a_mk;
      __builtin_memcpy(&a_mk, a + m * a_row + k * a_depth, sizeof(a_mk));
      for (int n = 0; n < kVectors; ++n) multiply_add(b_k[n], a_mk, sum[m][n]);
    }
  }
}

// c (+)= a b, accumulated in registers.
template <Summation kSummation, int kRows, int kVectors, typename E, typename S>
inline void multiply_block(const E* a, std::ptrdiff_t a_row, std::ptrdiff_t a_depth, const E* b,
                           std::ptrdiff_t b_depth, int depth, S* c, std::ptrdiff_t c_row,
                           bool accumulate) {
  constexpr int kN = kLanes<S>;
  const auto for_each = [](auto f) {
    for (int m = 0; m < kRows; ++m) {
      for (int n = 0; n < kVectors; ++n) f(m, n);
    }
  };
  Vector<S> sum[kRows][kVectors] = {};
  if constexpr (kSummation == Summation::kAtOnce) {
    add_products(a, a_row, a_depth, b, b_depth, depth, sum);
    // The old c is added last: separate sums of tiles round less than one long sum.
    if (accumulate) for_each([&](int m, int n) { sum[m][n] += load(c + m * c_row + n * kN); });
  } else {
    if (accumulate) for_each([&](int m, int n) { sum[m][n] = load(c + m * c_row + n * kN); });
    for (int k = 0; k < depth; k += kPart<E>) {
      Vector<S> part[kRows][kVectors] = {};
      add_products(a + k * a_depth, a_row, a_depth, b + k * b_depth, b_depth,
                   min_of(kPart<E>, depth - k), part);
      for_each([&](int m, int n) { sum[m][n] += part[m][n]; });
    }
  }
  for_each([&](int m, int n) { store(c + m * c_row + n * kN, sum[m][n]); });
}

// Maximum width of a register block, in vectors of columns. A register block has half of a panel's
// rows, or a quarter where parts take as many registers as sums. Accumulators, one row of b and a
// broadcast fill the 16 registers of AVX2; AVX-512 has 32, and whole tiles are four of its vectors
// wide.
constexpr int kMaxVectors = kVectorBytes == 64 ? 4 : 3;

// Computes kPanel rows of c; `columns` is any multiple of the lanes. Inlined because callers know
// the strides, which saves a tenth of the time.
template <Summation kSummation = Summation::kAtOnce, typename E, typename S>
[[gnu::always_inline]] inline void multiply_panel(const E* a, std::ptrdiff_t a_row,
                                                  std::ptrdiff_t a_depth, const E* b,
                                                  std::ptrdiff_t b_depth, int depth, S* c,
                                                  std::ptrdiff_t c_row, int columns,
                                                  bool accumulate) {
  constexpr int kParts = kSummation == Summation::kInParts ? 2 : 1;
  const auto blocks = [&]<int kRows, int kVectors>() {
    for (int m = 0; m < kPanel; m += kRows) {
      multiply_block<kSummation, kRows, kVectors>(a + m * a_row, a_row, a_depth, b, b_depth, depth,
                                                  c + m * c_row, c_row, accumulate);
    }
  };
  while (columns > 0) {
    int vectors = min_of(columns / kLanes<S>, kMaxVectors);
    if (vectors == 4) {
      if constexpr (kMaxVectors >= 4) blocks.template operator()<kPanel / 2 / kParts, 4>();
    } else if (vectors == 3) {
      blocks.template operator()<kPanel / 2 / kParts, 3>();
    } else if (vectors == 2) {
      blocks.template operator()<kPanel / 2 / kParts, 2>();
    } else {
      blocks.template operator()<kPanel / kParts, 1>();
    }
    columns -= vectors * kLanes<S>;
    b += vectors * kLanes<S>;
    c += vectors * kLanes<S>;
  }
}

// Rows of scratch that hold `num_rows`: whole panels, and whole vectors once transposed.
template <typename S>
inline int padded_rows(int num_rows) {
  return round_up(num_rows, kPanel > kLanes<S> ? kPanel : kLanes<S>);
}

// Copies the rows times `factor` to `operands`, [padded_rows(num_rows), columns], padded with
// zeros.
template <typename T>
void load_rows(Rows<const T> rows, int num_rows, int head_dim, int columns, Operand<T>* operands,
               Sum<T> factor = 1) {
  const int all_rows = padded_rows<Sum<T>>(num_rows);
  const auto fill = [&](auto* x, auto convert) {
    for (int r = 0; r < num_rows; ++r) {
      const T* row = rows.data + r * rows.stride;
      for (int d = 0; d < head_dim; ++d) x[r * columns + d] = convert(row[d]);
      for (int d = head_dim; d < columns; ++d) x[r * columns + d] = {};
    }
    for (int i = num_rows * columns; i < all_rows * columns; ++i) x[i] = {};
  };
  if constexpr (kTakesPairs<T>) {
    T* numbers = reinterpret_cast<T*>(operands);
    if (factor == 1) {
      fill(numbers, [](T x) { return x; });
    } else {
      fill(numbers, [factor](T x) { return from_sum<T>(factor * to_sum(x)); });
    }
  } else if (factor == 1) {
    fill(operands, [](T x) { return to_sum(x); });
  } else {
    fill(operands, [factor](T x) { return factor * to_sum(x); });
  }
}

// The rows times `factor`, for a product that reads each element once: in place if the elements
// already are operands and fill whole panels, else copied to `scratch`.
template <typename T>
Rows<const Operand<T>> operand_rows(Rows<const T> rows, int num_rows, int head_dim, int columns,
                                    Operand<T>* scratch, Sum<T> factor = 1) {
  using E = Operand<T>;
  constexpr int kN = kNumbers<E>;
  if constexpr (sizeof(E) == kN * sizeof(T)) {
    const bool aligned = reinterpret_cast<std::uintptr_t>(rows.data) % sizeof(E) == 0;
    if (factor == 1 && aligned && rows.stride % kN == 0 && head_dim % kN == 0 &&
        num_rows % kPanel == 0) {
      return {reinterpret_cast<const E*>(rows.data), rows.stride / kN};
    }
  }
  load_rows(rows, num_rows, head_dim, columns, scratch, factor);
  return {scratch, columns / kN};
}

// Whether any of `count` elements is NaN; `count` is a multiple of the lanes.
template <typename S>
inline bool has_nan(const S* x, int count) {
  Bits<S> found{};
  for (int i = 0; i < count; i += kLanes<S>) {
    const Vector<S> v = load(x + i);
    found |= v != v;
  }
  Bit<S> any = 0;
  for (int lane = 0; lane < kLanes<S>; ++lane) any |= found[lane];
  return any != 0;
}

// Prefetches rows that are needed soon, all of them in parallel: a row is too short, and rows lie
// too far apart, for the CPU's own prefetcher. Does nothing if rows.data is null.
enum class Use { kRead, kWrite };
template <Use use, typename T>
inline void prefetch_rows(Rows<T> rows, int num_rows, int head_dim) {
  constexpr int kLine = 64 / sizeof(T), kIntoL2 = 2;
  if (!rows.data) return;
  for (int r = 0; r < num_rows; ++r) {
    for (int d = 0; d < head_dim; d += kLine) {
      __builtin_prefetch(rows.data + r * rows.stride + d, use == Use::kWrite, kIntoL2);
    }
  }
}

// x [rows, columns], given in rows, as stacked operands: x itself, or for pairs a copy in
// `stacked`.
template <typename T>
inline const T* stack_rows(const T* x, int, int, T*) {
  return x;
}
inline const Bf16Pair* stack_rows(const Bf16Pair* x, int rows, int columns, Bf16Pair* stacked) {
  constexpr int kN = kLanes<Bf16Pair>;
  constexpr Bf16Pair kLow = 0xffff;
  for (int r = 0; r < rows; r += 2) {
    for (int c = 0; c < columns / 2; c += kN) {
      const Vector<Bf16Pair> first = load(x + r * columns / 2 + c);
      const Vector<Bf16Pair> second = load(x + (r + 1) * columns / 2 + c);
      // The columns 2c, 2c + 2, .. and the columns between.
      Vector<Bf16Pair> even = (first & kLow) | second << 16;
      Vector<Bf16Pair> odd = (first >> 16 & kLow) | (second & ~kLow);
      interleave<Bf16Pair>(even, odd);
      store(stacked + r / 2 * columns + 2 * c, even);
      store(stacked + r / 2 * columns + 2 * c + kN, odd);
    }
  }
  return stacked;
}

// x_t [columns, rows] = x [rows, columns] transposed; both sizes are multiples of the lanes. Counts
// in operands, whose rows lie x_row and x_t_row apart.
template <typename T>
void transpose_matrix(const T* x, int rows, int columns, std::ptrdiff_t x_row, T* x_t,
                      std::ptrdiff_t x_t_row) {
  constexpr int kN = kLanes<T>;
  for (int r = 0; r < rows; r += kN) {
    for (int c = 0; c < columns; c += kN) {
      Vector<T> block[kN];
      for (int i = 0; i < kN; ++i) block[i] = load(x + (r + i) * x_row + c);
      transpose<T>(block);
      for (int i = 0; i < kN; ++i) store(x_t + (c + i) * x_t_row + r, block[i]);
    }
  }
}

// Stores lanes i.. of rows j.. of weights [kTile, kTile] as stacked operands.
template <typename S>
inline void store_stacked(const Vector<S> (&x)[1], int j, int i, S* w) {
  store(w + j * kTile + i, x[0]);
}
#if defined(__AVX512BF16__)
template <std::size_t... kLane>
inline Vector<Bf16Pair> pair_lanes(Vector<float> a, Vector<float> b,
                                   std::index_sequence<kLane...>) {
  using Words [[gnu::vector_size(kVectorBytes)]] = std::int16_t;
  const auto a_then_b = reinterpret_cast<Words>(_mm512_cvtne2ps_pbh(b, a));
  return reinterpret_cast<Vector<Bf16Pair>>(
      __builtin_shufflevector(a_then_b, a_then_b, (kLane / 2 + kLane % 2 * kLanes<float>)...));
}
inline void store_stacked(const Vector<float> (&x)[2], int j, int i, Bf16Pair* w) {
  store(w + j / 2 * kTile + i,
        pair_lanes(x[0], x[1], std::make_index_sequence<2 * kLanes<float>>()));
}
// Stores lanes i.. of row j, in rows.
inline void store_in_row(Vector<float> x, int j, int i, Bf16Pair* w) {
  const __m256bh narrow = _mm512_cvtneps_pbh(x);
  __builtin_memcpy(w + (j * kTile + i) / 2, &narrow, sizeof(narrow));
}
#endif

}  // namespace
}  // namespace birkhoff
