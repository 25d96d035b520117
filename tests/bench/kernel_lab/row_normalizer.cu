// Attention with a sparse normalizer: top-k, which lists a few keys for each query, and sparsemax
// and entmax, forward and backward.
#include <algorithm>
#include <cmath>

#include "attention/kernels/counting_sort/gpu_sort.h"
#include "attention/kernels/row_normalizer/gpu_params.h"
#include "tests/bench/kernel_lab/attention.h"

namespace birkhoff::lab {
namespace {

constexpr int kKept = 8;  // keys of a list

// The exponents a of the first and the last head; the others lie evenly between them. Top-k has
// the gradients of a = 1: its weights are the softmax of a list.
struct Normalizer {
  const char* name;
  float first, last;

  bool is_top_k() const { return last == 1; }
  bool learns() const { return first != last; }
};

struct Shape : AttentionSize {
  Normalizer normalizer;
  bool causal, distances;  // distances: with terms, as Transformer-XL has them

  std::int64_t slots() const { return normalizer.is_top_k() ? all_queries() * kKept : 0; }
  std::int64_t terms() const { return distances ? all_queries() * keys : 0; }
  // Pairs of a query and a key that it sees. The queries are the last tokens.
  double pairs() const {
    return static_cast<double>(all_queries()) * (keys - (causal ? 0.5 * (queries - 1) : 0));
  }
  std::string text() const {
    return AttentionSize::text() + (causal ? ", causal" : ", encoder") +
           (distances ? ", distances" : "");
  }
};

void fill_ranges(const Shape& s, const Array<std::int32_t>& ends, const Array<std::int32_t>& kept) {
  std::int32_t *end = ends.get(), *most = kept.get();
  for_each(ends.size(), [=] __device__(std::int64_t i) {
    end[i] = s.keys - (s.causal ? s.queries - 1 - static_cast<int>(i % s.queries) : 0);
    most[i] = min(end[i], kKept);
  });
}
void fill_exponents(const Shape& s, const Float& excess) {
  float* to = excess.get();
  for_each(s.heads, [=] __device__(std::int64_t i) {
    const Normalizer& n = s.normalizer;
    to[i] = n.first - 1 + (n.last - n.first) * i / (s.heads - 1);
  });
}

// One copy of all tensors, as gpu_params.h has them.
struct Tensors : AttentionTensors {
  Tensors(const Shape& s, std::uint64_t seed)
      : AttentionTensors(s, seed),
        terms(s.terms()),
        d_terms(s.terms()),
        weight(s.slots()),
        d_score(s.slots()),
        excess(s.heads),
        threshold(s.all_queries()),
        mean(s.all_queries()),
        d_alpha(s.normalizer.learns() ? s.all_queries() : 0),
        first(std::int64_t{s.batch} * s.queries),
        end(first.size()),
        kept(first.size()),
        index(s.slots()),
        order(s.slots()),
        starts(s.all_heads() * (s.keys + 1)) {
    terms.fill_random(seed + 5, 4);
    d_terms.zero();
    first.zero();
    fill_ranges(s, end, kept);
    fill_exponents(s, excess);
    RowAttentionParams shared{};
    shared.dtype = KernelDtype::kBFloat16;
    shared.batch = s.batch;
    shared.heads = s.heads;
    shared.queries = s.queries;
    shared.keys = s.keys;
    shared.head_dim = s.head_dim;
    shared.scale = s.scale();
    shared.first = first.get();
    shared.end = end.get();
    set_rows(shared);
    if (s.distances) {
      shared.terms = terms.get();
      shared.d_terms = d_terms.get();
    }
    static_cast<RowAttentionParams&>(top_k) = shared;
    top_k.most = kKept;
    top_k.kept = kept.get();
    top_k.index = index.get();
    top_k.weight = weight.get();
    top_k.d_score = d_score.get();
    top_k.order = order.get();
    top_k.starts = starts.get();
    slots_of_keys.heads = s.all_heads();
    slots_of_keys.slots = s.queries * kKept;
    slots_of_keys.count = s.keys;
    slots_of_keys.numbers = index.get();
    slots_of_keys.order = order.get();
    slots_of_keys.starts = starts.get();
    static_cast<RowAttentionParams&>(entmax) = shared;
    entmax.excess = excess.get();
    entmax.threshold = threshold.get();
    entmax.mean = mean.get();
    entmax.d_alpha = s.normalizer.learns() ? d_alpha.get() : nullptr;
  }

  Float terms, d_terms, weight, d_score, excess, threshold, mean, d_alpha;
  Array<std::int32_t> first, end, kept, index, order, starts;
  TopKParams top_k{};
  EntmaxParams entmax{};
  CountingSortParams slots_of_keys{};
};

void launch_forward(const Shape& s, const Tensors& t, cudaStream_t stream) {
  if (!s.normalizer.is_top_k()) return launch_entmax(t.entmax, stream);
  launch_top_k_choice(t.top_k, stream);
  launch_listed_values(t.top_k, stream);
}
void launch_backward(const Shape& s, const Tensors& t, cudaStream_t stream) {
  if (!s.normalizer.is_top_k()) return launch_entmax_backward(t.entmax, stream);
  launch_counting_sort(t.slots_of_keys, stream);
  launch_listed_gradients(t.top_k, stream);
}

struct Slow : AllPairs {
  Slow(const Shape& s, const Tensors& t, const Float& weights, const Float& score_gradients)
      : AllPairs(t, weights, score_gradients),
        is_top_k(s.normalizer.is_top_k()),
        end(t.end.get()),
        terms(t.entmax.terms),
        excess(t.excess.get()) {}

  __device__ int end_of(std::int64_t query) const {
    return end[query / queries / heads * queries + query % queries];
  }
  __device__ float excess_of(std::int64_t query) const { return excess[query / queries % heads]; }
  __device__ std::int64_t term(std::int64_t query, int key) const {
    return query * keys + (queries - 1 - query % queries + key);
  }
  // Writes a query's scores, for entmax times a - 1, to where its weights will be. Attempts after
  // the first draw the query again.
  __device__ void take_scores(std::int64_t query, int attempt) const {
    for (int d = 0; attempt > 0 && d < head_dim; ++d) {
      const std::int64_t i = query * head_dim + d;
      q[i] = from_float<__nv_bfloat16>(random_value(1000 + attempt, i));
    }
    const double factor = is_top_k ? scale : scale * excess_of(query);
    for (int key = 0; key < end_of(query); ++key) {
      const double sum = product(query, key) + (terms != nullptr ? terms[term(query, key)] : 0);
      p[place(query, key)] = static_cast<float>(factor * sum);
    }
  }

  bool is_top_k;
  const std::int32_t* end;
  const float *terms, *excess;
};

// Which keys have a weight must not depend on rounding: the gradients of sparsemax and top-k jump
// there. Queries with two scores, or a score and the threshold, closer than this are drawn again.
constexpr float kGap = 1e-4f;

// Lists and weights of top-k.
void solve_lists(const Shape& s, const Slow& slow, const Array<std::int32_t>& index,
                 const Float& weight) {
  std::int32_t* to_index = index.get();
  float* to_weight = weight.get();
  for_each(s.all_queries(), [=] __device__(std::int64_t query) {
    float best[kKept + 1];
    int key_of[kKept + 1];
    bool close = true;
    for (int attempt = 0; close; ++attempt) {
      slow.take_scores(query, attempt);
      for (int n = 0; n <= kKept; ++n) {
        best[n] = -INFINITY;
        key_of[n] = -1;
      }
      for (int key = 0; key < slow.end_of(query); ++key) {
        const float score = slow.p[slow.place(query, key)];
        if (!(score > best[kKept])) continue;
        int n = kKept;
        for (; n > 0 && score > best[n - 1]; --n) {
          best[n] = best[n - 1];
          key_of[n] = key_of[n - 1];
        }
        best[n] = score;
        key_of[n] = key;
      }
      close = false;
      for (int n = 0; n < kKept; ++n) close |= best[n] - best[n + 1] < kGap;
    }
    double sum = 0;
    for (int n = 0; n < kKept; ++n) sum += exp(static_cast<double>(best[n]) - best[0]);
    for (int key = 0; key < slow.end_of(query); ++key) slow.p[slow.place(query, key)] = 0;
    for (int n = 0; n < kKept; ++n) {
      const auto p = static_cast<float>(exp(static_cast<double>(best[n]) - best[0]) / sum);
      to_index[query * kKept + n] = key_of[n];
      to_weight[query * kKept + n] = p;
      if (key_of[n] >= 0) slow.p[slow.place(query, key_of[n])] = p;
    }
  });
}

// Thresholds and weights of entmax, by bisection.
void solve_thresholds(const Shape& s, const Slow& slow, const Float& threshold) {
  float* to = threshold.get();
  for_each(s.all_queries(), [=] __device__(std::int64_t query) {
    const int end = slow.end_of(query);
    const double power = 1.0 / slow.excess_of(query);
    double low = 0;
    bool close = true;
    for (int attempt = 0; close; ++attempt) {
      slow.take_scores(query, attempt);
      float largest = -INFINITY;
      for (int key = 0; key < end; ++key) largest = fmaxf(largest, slow.p[slow.place(query, key)]);
      double high = largest;
      low = high - 1;
      for (int step = 0; step < 40; ++step) {
        const double middle = (low + high) / 2;
        double sum = 0;
        for (int key = 0; key < end; ++key) {
          const double u = slow.p[slow.place(query, key)] - middle;
          if (u > 0) sum += pow(u, power);
        }
        (sum >= 1 ? low : high) = middle;
      }
      close = false;
      for (int key = 0; power == 1 && key < end; ++key) {
        close |= fabs(slow.p[slow.place(query, key)] - low) < kGap;
      }
    }
    to[query] = static_cast<float>(low);
    for (int key = 0; key < end; ++key) {
      float& p = slow.p[slow.place(query, key)];
      p = p > low ? static_cast<float>(pow(p - low, power)) : 0.0f;
    }
  });
}

// The gradients of scores, of terms of distances and of exponents, which may be null. The formulas
// of attention/kernels/row_normalizer/gpu_entmax_backward.h with r = p^(2 - a).
void solve_scores(const Shape& s, const Slow& slow, float* d_terms, float* d_alpha) {
  for_each(s.all_queries(), [=] __device__(std::int64_t query) {
    const int end = slow.end_of(query);
    const double excess = slow.is_top_k ? 0 : slow.excess_of(query);
    double sum_r = 0, sum_rg = 0, sum_p = 0, sum_pg = 0, sum_e = 0, sum_eg = 0;
    for (int key = 0; key < end; ++key) {
      const double p = slow.p[slow.place(query, key)];
      if (p == 0) continue;
      const double g = slow.gradient(query, key), r = pow(p, 1 - excess), e = -p * log(p);
      slow.d_s[slow.place(query, key)] = static_cast<float>(g);
      sum_r += r;
      sum_rg += r * g;
      sum_p += p;
      sum_pg += p * g;
      sum_e += e;
      sum_eg += e * g;
    }
    const double mean = sum_rg / sum_r;
    for (int key = 0; key < end; ++key) {
      const double p = slow.p[slow.place(query, key)];
      if (p == 0) continue;
      float& d_s = slow.d_s[slow.place(query, key)];
      d_s = static_cast<float>(pow(p, 1 - excess) * (d_s - mean));
      if (d_terms != nullptr) d_terms[slow.term(query, key)] = slow.scale * d_s;
    }
    if (d_alpha == nullptr) return;
    d_alpha[query] =
        static_cast<float>(((sum_pg / sum_p - mean) / excess + sum_eg - mean * sum_e) / excess);
  });
}

void run(Lab& lab, const Shape& s) {
  const bool is_top_k = s.normalizer.is_top_k();
  const std::string name = s.normalizer.name, shape = s.text(), forward_name = name + " forward",
                    backward_name = name + " backward", choice_name = name + " choice";
  if (!lab.wants(forward_name, shape) && !lab.wants(backward_name, shape) &&
      !(is_top_k && lab.wants(choice_name, shape))) {
    return;
  }
  const std::int64_t queries = s.query_bytes(), keys = s.key_bytes(), terms = 4 * s.terms(),
                     lists = 8 * s.slots();
  const std::int64_t bytes = 2 * queries + 2 * keys + terms + lists;
  std::vector<Tensors> tensors;
  for (int copy = 0; copy < lab.copies(bytes); ++copy) {
    tensors.emplace_back(s, 100 * static_cast<std::uint64_t>(copy));
  }
  const Tensors& t = tensors[0];
  const Float p(Slow::count(s)), d_s(p.size()), weight(s.slots()), threshold(s.all_queries()),
      d_terms(s.terms()), d_alpha(t.d_alpha.size());
  const Array<std::int32_t> index(s.slots());
  d_terms.zero();
  const Slow slow(s, t, p, d_s);
  if (is_top_k) {
    solve_lists(s, slow, index, weight);
  } else {
    solve_thresholds(s, slow, threshold);
  }
  solve_scores(s, slow, s.distances ? d_terms.get() : nullptr,
               s.normalizer.learns() ? d_alpha.get() : nullptr);
  const AttentionResults<float> exact(t);
  const AttentionResults<__nv_bfloat16> rounded(t);
  solve_products<false>(s, slow, exact);
  solve_products<true>(s, slow, rounded);

  // Of the products only those that give all scores; the others are of keys with a weight.
  const double products = 2.0 * s.head_dim * s.pairs();
  Case forward{forward_name, shape, static_cast<double>(bytes), products, bytes};
  forward.launch = [&](int copy, cudaStream_t stream) {
    launch_forward(s, tensors[static_cast<std::size_t>(copy)], stream);
  };
  forward.outputs = {output("out", t.out, exact.out, rounded.out)};
  // Numbers in fp32, whose error is that of sums of products, not of one rounding.
  const auto numbers = [](const std::string& what, const Float& x, const Float& exact,
                          float epsilon) {
    Output made = output(what, x, exact, exact);
    made.epsilon = epsilon;
    return made;
  };
  if (is_top_k) {
    Case choice{choice_name, shape, static_cast<double>(bytes - queries - keys), products, bytes};
    choice.launch = [&](int copy, cudaStream_t stream) {
      launch_top_k_choice(tensors[static_cast<std::size_t>(copy)].top_k, stream);
    };
    choice.outputs = {output("lists", t.index, index, index),
                      numbers("weights", t.weight, weight, 0x1p-17f)};
    if (lab.wants(choice_name, shape)) lab.run(choice);
  } else {
    forward.outputs.push_back(numbers("thresholds", t.threshold, threshold, 0x1p-17f));
  }
  if (lab.wants(forward_name, shape)) lab.run(forward);

  // The backward pass reads what the forward pass wrote, in each copy.
  for (const Tensors& each : tensors) launch_forward(s, each, nullptr);
  const std::int64_t backward_bytes = 3 * queries + 4 * keys + (is_top_k ? 0 : terms) + lists;
  Case backward{backward_name, shape, static_cast<double>(backward_bytes),
                is_top_k ? 8.0 * s.head_dim * static_cast<double>(s.slots()) : products,
                backward_bytes};
  backward.launch = [&](int copy, cudaStream_t stream) {
    launch_backward(s, tensors[static_cast<std::size_t>(copy)], stream);
  };
  backward.outputs = gradient_outputs(t, exact, rounded);
  if (s.normalizer.learns()) {
    // A difference of sums, divided by (a - 1)^2.
    backward.outputs.push_back(numbers("d_alpha", t.d_alpha, d_alpha, 0x1p-12f));
  }
  if (s.distances) {
    backward.outputs.push_back(numbers("d_terms", t.d_terms, d_terms, 0x1p-16f));
    // Only those of keys with a weight are written.
    backward.outputs.back().poison = [x = t.d_terms] { x.zero(); };
  }
  if (lab.wants(backward_name, shape)) lab.run(backward);
}

}  // namespace

void cases(Lab& lab) {
  const Normalizer top_k{"top-k", 1, 1}, sparsemax{"sparsemax", 2, 2},
      entmax15{"entmax15", 1.5f, 1.5f}, entmax{"entmax", 1.1f, 1.7f};
  for (const Normalizer& each : {top_k, sparsemax, entmax15, entmax}) {
    run(lab, {{4, 16, 1024, 1024, 64}, each, true, false});
    run(lab, {{4, 16, 1024, 1024, 64}, each, false, false});
    run(lab, {{4, 16, 4096, 4096, 64}, each, false, false});
  }
  for (const Normalizer& each : {top_k, entmax15}) {
    run(lab, {{4, 16, 1024, 1024, 128}, each, false, false});
    run(lab, {{22, 8, 512, 1024, 64}, each, true, true});  // a layer of xl_enwik8_paper
  }
}

}  // namespace birkhoff::lab
