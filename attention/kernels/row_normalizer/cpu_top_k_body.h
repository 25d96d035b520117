// Top-k attention of one head (cpu_rows.h), compiled once for each instruction set. A tile of
// queries streams over the keys; each lane keeps the largest scores of its query, sorted, in a list
// to which a key that belongs there is added by exchanges from its place on.
#pragma once

#include "attention/kernels/row_normalizer/cpu_terms_body.h"

namespace birkhoff {
namespace {

template <typename T>
class TopKPasses : public HeadTiles<T> {
 public:
  using Tiles = HeadTiles<T>;
  using Tiles::a_t_, Tiles::q_, Tiles::k_, Tiles::v_, Tiles::d_out_, Tiles::d_k_, Tiles::d_v_;
  using Tiles::kInfinity, Tiles::kN, Tiles::row;
  using typename Tiles::S;

  static std::size_t scratch_bytes(const TopKShape& shape) {
    ScratchLayout layout;
    static constexpr TopKHead<T> kNone{};
    TopKPasses(shape, kNone, layout);
    return layout.used;
  }

  TopKPasses(const TopKShape& shape, const TopKHead<T>& head, ScratchLayout& memory)
      : Tiles(shape, head, memory), shape_(shape), head_(head) {
    acc_ = memory.take<S>(static_cast<std::size_t>(this->columns));
    s_t_ = memory.take<S>(kTile * kTile);
    const auto lists = static_cast<std::size_t>(shape.kept) * kN;
    best_ = memory.take<S>(lists * (kTile / kN));
    index_ = memory.take<Bit<S>>(lists * (kTile / kN));
  }

  void forward() {
    this->load_rows();
    this->for_tiles({q_, head_.num_queries}, [&](int first_query, int num_queries, int lanes) {
      Range range[kTile / kN];
      const Range all = ranges(first_query, num_queries, range);
      start();
      for (int first = all.first / kTile * kTile; first < all.end; first += kTile) {
        const int count = min_of(kTile, head_.num_keys - first);
        this->multiply(a_t_, lanes, k_ + row(first), count, s_t_);
        add_terms(head_, static_cast<S>(shape_.scale), first_query, num_queries, first, count, s_t_,
                  kTile);
        for (int i = 0; i < lanes; i += kN) collect(i, first, count, range[i / kN]);
      }
      for (int i = 0; i < num_queries; ++i)
        attend(first_query + i, i, range[i / kN].met_nan[i % kN]);
    });
  }

  void backward() {
    this->load_rows();
    this->load_gradients();
    for (int i = 0; i < head_.num_queries; ++i) add_gradients(i);
    this->write_key_gradients();
  }

 private:
  // The keys that the queries of some lanes see.
  struct Range {
    int first = 0, end = 0;          // of all lanes together
    int all_first = 0, all_end = 0;  // that every lane sees
    Bits<S> first_of{}, end_of{};
    Bits<S> met_nan{};
  };

  // Fills a range for each vector of lanes and returns that of all of them.
  Range ranges(int first_query, int num_queries, Range* range) const {
    Range all{.first = head_.num_keys};
    for (int i = 0; i < kTile; i += kN) {
      Range& r = range[i / kN];
      r = {.first = head_.num_keys, .all_end = head_.num_keys};
      for (int lane = 0; lane < kN && i + lane < num_queries; ++lane) {
        const int first = head_.first[first_query + i + lane],
                  end = min_of(head_.end[first_query + i + lane], head_.num_keys);
        r.first_of[lane] = first;
        r.end_of[lane] = end;
        r.first = min_of(r.first, first);
        r.end = r.end > end ? r.end : end;
        r.all_first = r.all_first > first ? r.all_first : first;
        r.all_end = min_of(r.all_end, end);
      }
      all.first = min_of(all.first, r.first);
      all.end = all.end > r.end ? all.end : r.end;
    }
    return all;
  }

  void start() const {
    for (int x = 0; x < shape_.kept * kTile; ++x) {
      best_[x] = -kInfinity;
      index_[x] = -1;
    }
  }

  static bool any(Bits<S> x) {
    using Words [[gnu::vector_size(kVectorBytes)]] = std::int64_t;
    const auto words = reinterpret_cast<Words>(x);
    std::int64_t found = 0;
    for (int n = 0; n < kVectorBytes / 8; ++n) found |= words[n];
    return found != 0;
  }

  // Offers a tile of keys to the lists of the lanes from i on.
  void collect(int i, int first, int count, Range& range) const {
    if (range.end <= first || range.first >= first + count) return;
    const bool all_see = range.all_first <= first && first + count <= range.all_end;
    S* best = best_ + std::ptrdiff_t{i} * shape_.kept;
    Bit<S>* index = index_ + std::ptrdiff_t{i} * shape_.kept;
    const S* last = best + std::ptrdiff_t{shape_.kept - 1} * kN;
    Vector<S> least = load(last);
    for (int j = 0; j < count; j += kPanel) {
      const int end = min_of(j + kPanel, count);
      Vector<S> s[kPanel], top = Vector<S>{} - kInfinity;
      for (int n = j; n < end; ++n) {
        Vector<S> x = load(s_t_ + n * kTile + i);
        Bits<S> is_nan = x != x;
        if (!all_see) {
          const Bits<S> key = Bits<S>{} + (first + n),
                        sees = (key >= range.first_of) & (key < range.end_of);
          x = sees ? x : Vector<S>{} - kInfinity;
          is_nan &= sees;
        }
        range.met_nan |= is_nan;
        s[n - j] = x;
        top = x > top ? x : top;
      }
      if (!any(top > least)) continue;
      for (int n = j; n < end; ++n) {
        if (!any(s[n - j] > least)) continue;
        insert(s[n - j], first + n, best, index);
        least = load(last);
      }
    }
  }

  // Of equal scores the earlier key stays first. Behind the new score all others move back by one,
  // also those that are equal to the one before them.
  void insert(Vector<S> score, int key, S* best, Bit<S>* index) const {
    Bits<S> k = Bits<S>{} + key, moves{};
    for (int n = 0; n < shape_.kept; ++n) {
      const Vector<S> old = load(best + n * kN);
      const Bits<S> old_k = load_bits<S>(index + n * kN);
      const Bits<S> larger = score > old;
      moves |= larger;
      store(best + n * kN, moves ? score : old);
      const Bits<S> stored = moves ? k : old_k;
      __builtin_memcpy(index + n * kN, &stored, sizeof(stored));
      score = moves ? old : score;
      k = moves ? old_k : k;
    }
  }

  // Dropout's factor of a query's probability for a key.
  S factor(int query, int key) const {
    if (shape_.dropout == nullptr) return 1;
    const TileDropout& dropout = *shape_.dropout;
    const auto element =
        static_cast<std::uint64_t>(head_.first_element + query * dropout.query_stride + key);
    const PhiloxBlock block = philox_block(dropout.key, head_.sample_id, element >> 2);
    return block.words[element & 3] >> 8 >= dropout.least ? static_cast<S>(dropout.scale) : 0;
  }

  void add_scaled(S factor, const S* x, S* to) const {
    for (int d = 0; d < this->columns; d += kN) store(to + d, load(to + d) + factor * load(x + d));
  }

  // Softmax of a query's list, and its output.
  void attend(int query, int i, bool met_nan) const {
    const std::ptrdiff_t list = std::ptrdiff_t{i / kN * kN} * shape_.kept + i % kN;
    std::int32_t* index = head_.index + std::ptrdiff_t{query} * shape_.kept;
    S* weight = head_.weight + std::ptrdiff_t{query} * shape_.kept;
    const int kept = min_of(head_.kept[query], shape_.kept);
    S sum = 0;
    for (int n = 0; n < shape_.kept; ++n) {
      const bool taken = n < kept && index_[list + n * kN] >= 0;
      index[n] = taken ? static_cast<std::int32_t>(index_[list + n * kN]) : -1;
      weight[n] = 0;
      if (!taken) continue;
      Vector<S> distance{};
      distance[0] = best_[list + n * kN] - best_[list];
      weight[n] = exp<S>(distance)[0];
      sum += weight[n];
    }
    for (int d = 0; d < this->columns; ++d) acc_[d] = 0;
    for (int n = 0; n < shape_.kept && index[n] >= 0; ++n) {
      weight[n] /= sum;
      const S p = weight[n] * factor(query, index[n]);
      add_scaled(p, v_ + row(index[n]), acc_);
    }
    T* out = head_.out.data + query * head_.out.stride;
    for (int d = 0; d < this->head_dim; ++d) {
      out[d] = from_sum<T>(met_nan ? static_cast<S>(__builtin_nan("")) : acc_[d]);
    }
    if (!met_nan) return;
    if (index[0] < 0) index[0] = head_.first[query];
    weight[0] = static_cast<S>(__builtin_nan(""));
  }

  void add_gradients(int query) const {
    const std::int32_t* index = head_.index + std::ptrdiff_t{query} * shape_.kept;
    const S* weight = head_.weight + std::ptrdiff_t{query} * shape_.kept;
    const S *q = q_ + row(query), *d_out = d_out_ + row(query);
    const Rows<S>& d_terms = head_.d_terms;
    S d_p[kMaxKeptKeys], delta = 0;
    for (int n = 0; n < shape_.kept && index[n] >= 0; ++n) {
      const S c = factor(query, index[n]);
      d_p[n] = c * dot_product(d_out, v_ + row(index[n]), this->columns);
      delta += weight[n] * d_p[n];
      add_scaled(weight[n] * c, d_out, d_v_ + row(index[n]));
    }
    for (int d = 0; d < this->columns; ++d) acc_[d] = 0;
    for (int n = 0; n < shape_.kept && index[n] >= 0; ++n) {
      const S d_s = weight[n] * (d_p[n] - delta);
      if (d_terms.data != nullptr) {
        d_terms.data[query * d_terms.stride + index[n]] = d_s * static_cast<S>(shape_.scale);
      }
      add_scaled(d_s, k_ + row(index[n]), acc_);
      add_scaled(d_s, q, d_k_ + row(index[n]));
    }
    T* d_q = head_.d_q.data + query * head_.d_q.stride;
    for (int d = 0; d < this->head_dim; ++d) {
      d_q[d] = from_sum<T>(acc_[d] * static_cast<S>(shape_.scale));
    }
  }

  const TopKShape& shape_;
  const TopKHead<T>& head_;
  S *acc_, *s_t_;
  // Lists of scores and keys of a tile, [kTile / kN, kept, kN].
  S* best_;
  Bit<S>* index_;
};

template <typename T>
void top_k_forward(const TopKShape& shape, const TopKHead<T>& head, void* scratch) {
  ScratchLayout memory{static_cast<std::byte*>(scratch)};
  TopKPasses<T>(shape, head, memory).forward();
}
template <typename T>
void top_k_backward(const TopKShape& shape, const TopKHead<T>& head, void* scratch) {
  ScratchLayout memory{static_cast<std::byte*>(scratch)};
  TopKPasses<T>(shape, head, memory).backward();
}

}  // namespace
}  // namespace birkhoff
