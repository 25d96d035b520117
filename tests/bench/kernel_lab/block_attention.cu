// Block-local attention (one source of keys) and the attention of Sinkhorn blocks (two: a sorted
// block and the own one), forward and backward.
#include <algorithm>
#include <cmath>

#include "attention/kernels/block_attention/gpu_params.h"
#include "tests/bench/kernel_lab/lab.h"

namespace birkhoff::lab {
namespace {

using Element = __nv_bfloat16;

struct Shape {
  int batch, heads, length, head_dim, block, sources;
  bool causal;

  std::int64_t elements() const { return std::int64_t{batch} * heads * length * head_dim; }
  std::int64_t queries() const { return std::int64_t{batch} * heads * length; }
  std::string text() const {
    return "L " + std::to_string(length) + ", D " + std::to_string(head_dim) + ", b " +
           std::to_string(block) + (causal ? ", causal" : ", encoder");
  }
  // Pairs of a query and a key that are multiplied.
  double pairs() const {
    return static_cast<double>(queries()) * block * (sources - (causal ? 0.5 : 0));
  }
};

// One copy of all tensors, [B, H, L, D]; the last source is the queries' own block.
struct Tensors {
  explicit Tensors(const Shape& s, std::uint64_t seed)
      : q(s.elements()),
        out(s.elements()),
        d_out(s.elements()),
        d_q(s.elements()),
        max(s.queries()),
        inverse(s.queries()),
        delta(s.queries()) {
    q.fill_random(seed + 1);
    d_out.fill_random(seed + 2);
    for (int i = 0; i < s.sources; ++i) {
      const auto of_source = static_cast<std::uint64_t>(10 * i);
      k.push_back(Half(s.elements()).fill_random(seed + of_source + 3));
      v.push_back(Half(s.elements()).fill_random(seed + of_source + 4));
      d_k.emplace_back(s.elements());
      d_v.emplace_back(s.elements());
    }
  }
  std::int64_t bytes(bool backward) const {
    const auto rows = static_cast<std::int64_t>(k.size());
    return q.bytes() * (backward ? 4 + 4 * rows : 2 + 2 * rows);
  }

  Half q, out, d_out, d_q;
  Float max, inverse, delta;
  std::vector<Half> k, v, d_k, d_v;
};

BlockAttentionParams params_of(const Shape& s, const Tensors& t) {
  const auto rows = [&](const Half& x) {
    const std::int64_t row = s.head_dim, block = row * s.block, head = row * s.length;
    return BlockRowsParams{x.words(), {head * s.heads, head, block, row}};
  };
  BlockAttentionParams p{};
  p.dtype = KernelDtype::kBFloat16;
  p.batch = s.batch;
  p.heads = s.heads;
  p.blocks = s.length / s.block;
  p.block = s.block;
  p.head_dim = s.head_dim;
  p.group = 1;
  p.scale = 1 / std::sqrt(static_cast<float>(s.head_dim));
  p.q = rows(t.q);
  p.out = rows(t.out);
  p.d_out = rows(t.d_out);
  p.d_q = rows(t.d_q);
  p.max = t.max.get();
  p.inverse_sum = t.inverse.get();
  p.delta = t.delta.get();
  p.num_sources = s.sources;
  for (int i = 0; i < s.sources; ++i) {
    const auto at = static_cast<std::size_t>(i);
    KeySourceParams& source = p.sources[i];
    source.window.causal = s.causal && i + 1 == s.sources;
    source.first_mask = i;
    source.k = rows(t.k[at]);
    source.v = rows(t.v[at]);
    source.d_k = rows(t.d_k[at]);
    source.d_v = rows(t.d_v[at]);
  }
  return p;
}

// The slow kernels. kRounded: with the roundings of 16-bit products.
struct Slow {
  int head_dim, block, sources;
  bool causal;
  float scale;
  const Element *q, *d_out, *k[2], *v[2];
  float *max, *inverse, *delta;

  __device__ float dot(const Element* a, const Element* b) const {
    float sum = 0;
    for (int d = 0; d < head_dim; ++d) sum += to_float(a[d]) * to_float(b[d]);
    return sum;
  }
  __device__ bool sees(int source, std::int64_t query, int key) const {
    return !causal || source + 1 < sources || key <= query % block;
  }
  __device__ std::int64_t row(std::int64_t query, int key) const {
    return (query / block * block + key) * head_dim;
  }
};

// Values of one precision, [queries, D].
template <typename T>
struct Results {
  explicit Results(const Shape& s) : out(s.elements()), d_q(s.elements()) {
    for (int i = 0; i < s.sources; ++i) {
      d_k.emplace_back(s.elements());
      d_v.emplace_back(s.elements());
    }
  }
  Array<T> out, d_q;
  std::vector<Array<T>> d_k, d_v;
};

template <bool kRounded, typename T>
void solve_forward(const Shape& s, const Slow& slow, const Results<T>& results) {
  T* out = results.out.get();
  for_each(s.queries(), [=] __device__(std::int64_t query) {
    float max = -INFINITY, sum = 0, total[128] = {};
    for (int source = 0; source < slow.sources; ++source) {
      for (int key = 0; key < slow.block; ++key) {
        if (!slow.sees(source, query, key)) continue;
        max = fmaxf(max, slow.scale * slow.dot(slow.q + query * slow.head_dim,
                                               slow.k[source] + slow.row(query, key)));
      }
    }
    for (int source = 0; source < slow.sources; ++source) {
      for (int key = 0; key < slow.block; ++key) {
        if (!slow.sees(source, query, key)) continue;
        const std::int64_t row = slow.row(query, key);
        const float p =
            expf(slow.scale * slow.dot(slow.q + query * slow.head_dim, slow.k[source] + row) - max);
        sum += p;
        for (int d = 0; d < slow.head_dim; ++d) {
          total[d] += rounded<kRounded>(p) * to_float(slow.v[source][row + d]);
        }
      }
    }
    float delta = 0;
    for (int d = 0; d < slow.head_dim; ++d) {
      const std::int64_t i = query * slow.head_dim + d;
      const float value = rounded<kRounded>(total[d] / sum);
      out[i] = from_float<T>(value);
      delta += value * to_float(slow.d_out[i]);
    }
    slow.max[query] = max;
    slow.inverse[query] = 1 / sum;
    slow.delta[query] = delta;
  });
}

template <bool kRounded, typename T>
void solve_backward(const Shape& s, const Slow& slow, const Results<T>& results) {
  T* d_q = results.d_q.get();
  for_each(s.queries(), [=] __device__(std::int64_t query) {
    float total[128] = {};
    const std::int64_t at = query * slow.head_dim;
    for (int source = 0; source < slow.sources; ++source) {
      for (int key = 0; key < slow.block; ++key) {
        if (!slow.sees(source, query, key)) continue;
        const std::int64_t row = slow.row(query, key);
        const float p =
            expf(slow.scale * slow.dot(slow.q + at, slow.k[source] + row) - slow.max[query]) *
            slow.inverse[query];
        const float d_s = p * (slow.dot(slow.d_out + at, slow.v[source] + row) - slow.delta[query]);
        for (int d = 0; d < slow.head_dim; ++d) {
          total[d] += rounded<kRounded>(d_s) * to_float(slow.k[source][row + d]);
        }
      }
    }
    for (int d = 0; d < slow.head_dim; ++d) d_q[at + d] = from_float<T>(slow.scale * total[d]);
  });
  for (int source = 0; source < s.sources; ++source) {
    T* d_k = results.d_k[static_cast<std::size_t>(source)].get();
    T* d_v = results.d_v[static_cast<std::size_t>(source)].get();
    for_each(s.queries(), [=] __device__(std::int64_t key) {  // as many keys as queries
      float of_k[128] = {}, of_v[128] = {};
      const std::int64_t row = key * slow.head_dim;
      for (int i = 0; i < slow.block; ++i) {
        const std::int64_t query = key / slow.block * slow.block + i;
        if (!slow.sees(source, query, static_cast<int>(key % slow.block))) continue;
        const std::int64_t at = query * slow.head_dim;
        const float p =
            expf(slow.scale * slow.dot(slow.q + at, slow.k[source] + row) - slow.max[query]) *
            slow.inverse[query];
        const float d_s = p * (slow.dot(slow.d_out + at, slow.v[source] + row) - slow.delta[query]);
        for (int d = 0; d < slow.head_dim; ++d) {
          of_k[d] += rounded<kRounded>(d_s) * to_float(slow.q[at + d]);
          of_v[d] += rounded<kRounded>(p) * to_float(slow.d_out[at + d]);
        }
      }
      for (int d = 0; d < slow.head_dim; ++d) {
        d_k[row + d] = from_float<T>(slow.scale * of_k[d]);
        d_v[row + d] = from_float<T>(of_v[d]);
      }
    });
  }
}

void run(Lab& lab, const Shape& s) {
  const std::string kernel = s.sources == 1 ? "block-local" : "Sinkhorn blocks";
  if (!lab.wants(kernel + " forward", s.text()) && !lab.wants(kernel + " backward", s.text())) {
    return;
  }
  std::vector<Tensors> tensors;
  std::vector<BlockAttentionParams> params;
  const std::int64_t bytes = Tensors(s, 0).bytes(false);
  for (int copy = 0; copy < lab.copies(bytes); ++copy) {
    tensors.emplace_back(s, 100 * static_cast<std::uint64_t>(copy));
    params.push_back(params_of(s, tensors.back()));
  }
  const Tensors& t = tensors[0];
  Slow slow{s.head_dim, s.block, s.sources, s.causal, params[0].scale, t.q.get(), t.d_out.get()};
  for (int i = 0; i < s.sources; ++i) {
    slow.k[i] = t.k[static_cast<std::size_t>(i)].get();
    slow.v[i] = t.v[static_cast<std::size_t>(i)].get();
  }
  const Float max(s.queries()), inverse(s.queries()), delta(s.queries());
  slow.max = max.get();
  slow.inverse = inverse.get();
  slow.delta = delta.get();
  const Results<float> exact(s);
  const Results<Element> rounded(s);
  solve_forward<true>(s, slow, rounded);
  solve_backward<true>(s, slow, rounded);
  solve_forward<false>(s, slow, exact);
  solve_backward<false>(s, slow, exact);

  const double unit = static_cast<double>(t.q.bytes()), products = 2.0 * s.head_dim * s.pairs();
  const auto rows = static_cast<double>(s.sources);
  Case forward{kernel + " forward", s.text(), unit * (2 + 2 * rows), 2 * products, t.bytes(false)};
  forward.launch = [&](int copy, cudaStream_t stream) {
    launch_block_attention(params[static_cast<std::size_t>(copy)], stream);
  };
  forward.outputs = {output("out", t.out, exact.out, rounded.out)};
  if (lab.wants(forward.kernel, s.text())) lab.run(forward);

  // The backward pass reads what the forward pass wrote, in each copy.
  for (const BlockAttentionParams& p : params) launch_block_attention(p, nullptr);
  Case backward{kernel + " backward", s.text(), unit * (4 + 4 * rows), 5 * products, t.bytes(true)};
  backward.launch = [&](int copy, cudaStream_t stream) {
    launch_block_attention_backward(params[static_cast<std::size_t>(copy)], stream);
  };
  backward.outputs = {output("d_q", t.d_q, exact.d_q, rounded.d_q)};
  for (std::size_t i = 0; i < t.k.size(); ++i) {
    const std::string name = std::to_string(i);
    backward.outputs.push_back(output("d_k" + name, t.d_k[i], exact.d_k[i], rounded.d_k[i]));
    backward.outputs.push_back(output("d_v" + name, t.d_v[i], exact.d_v[i], rounded.d_v[i]));
  }
  if (lab.wants(backward.kernel, s.text())) lab.run(backward);
}

}  // namespace

void cases(Lab& lab) {
  for (const int block : {64, 128}) {
    for (const int sources : {1, 2}) {
      for (const bool causal : {false, true}) {
        for (const int length : {512, 4096, 16384}) {
          if (length == 16384 && causal) continue;
          run(lab, {4, 16, length, 64, block, sources, causal});
        }
        run(lab, {4, 16, 4096, 128, block, sources, causal});
      }
    }
  }
  run(lab, {4, 16, 4096, 64, 32, 1, false});
  run(lab, {4, 16, 4032, 64, 96, 1, true});
}

}  // namespace birkhoff::lab
