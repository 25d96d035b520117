// Block mixing of keys and values, without and with padding: y, then d_x and the parts of d_w in
// one launch function.
#include <algorithm>

#include "attention/kernels/block_mix/gpu_params.h"
#include "attention/kernels/block_mix/gpu_products.h"
#include "tests/bench/kernel_lab/lab.h"

namespace birkhoff::lab {
namespace {

using Element = __nv_bfloat16;

struct Shape {
  int batch, heads, blocks, block, head_dim;
  bool causal, padding = false;

  std::int64_t columns() const { return std::int64_t{block} * head_dim; }
  std::int64_t matrices() const { return std::int64_t{batch} * heads; }
  std::int64_t elements() const { return matrices() * blocks * columns(); }
  int padded() const { return (blocks + 7) / 8 * 8; }
  int diagonal() const { return causal ? -1 : blocks - 1; }
  std::string text() const {
    return "L " + std::to_string(blocks * block) + ", D " + std::to_string(head_dim) + ", N " +
           std::to_string(blocks) + (causal ? ", causal" : ", encoder") +
           (padding ? ", padding" : "");
  }

  // Sets of weights; with padding the columns of tokens that the last block of a sample lacks have
  // the second one.
  int sets() const { return padding ? 2 : 1; }
  std::int64_t set_size() const { return matrices() * blocks * padded(); }
  // Only the first sample ends with a whole block.
  __host__ __device__ int length_of(int sample) const {
    const int length = blocks * block;
    return padding ? length - sample * (length / batch + 5) : length;
  }
  // The first token of a block that has the second set.
  __host__ __device__ int split_of(int sample) const {
    const int last = length_of(sample) % block;
    return last == 0 ? block : last;
  }
  // Blocks that have the tokens of a set.
  __host__ __device__ int existing(int sample, int set) const {
    return (length_of(sample) + (set == 0 ? block - 1 : 0)) / block;
  }
  int parts() const {
    BlockMixParams p{};
    p.batch = batch;
    p.heads = heads;
    p.blocks = blocks;
    p.block = block;
    p.head_dim = head_dim;
    p.num_tensors = 2;
    return BlockMixShape::num_parts(p);
  }
};

// Rows that sum to about 1, and zeros where a block does not see another.
void fill_weights(const Shape& s, std::uint64_t seed, const Half& weights) {
  Element* to = weights.get();
  const int blocks = s.blocks, padded = s.padded(), diagonal = s.diagonal();
  const std::int64_t set_size = s.set_size();
  for_each(weights.size(), [=] __device__(std::int64_t i) {
    const int v = static_cast<int>(i % padded), u = static_cast<int>(i / padded % blocks);
    const int sample = static_cast<int>(i % set_size / padded / blocks / s.heads);
    const int existing = s.existing(sample, static_cast<int>(i / set_size));
    const bool seen = u < existing && v < existing && v <= u + diagonal;
    to[i] = from_float<Element>(seen ? fabsf(random_value(seed, i)) / blocks : 0);
  });
}

// NaN in padding, which the kernels must not read.
void fill_rows(const Shape& s, std::uint64_t seed, const Half& x) {
  x.fill_random(seed);
  Element* to = x.get();
  const std::int64_t of_head = s.columns() * s.blocks;
  for_each(x.size(), [=] __device__(std::int64_t i) {
    const int sample = static_cast<int>(i / of_head / s.heads);
    if (i % of_head / s.head_dim >= s.length_of(sample)) to[i] = from_float<Element>(NAN);
  });
}

void fill_lengths(const Shape& s, const Array<std::int64_t>& lengths) {
  std::int64_t* to = lengths.get();
  for_each(lengths.size(),
           [=] __device__(std::int64_t i) { to[i] = s.length_of(static_cast<int>(i)); });
}

struct Tensors {
  Tensors(const Shape& s, std::uint64_t seed)
      : weights(s.sets() * s.set_size()),
        d_weights(s.sets() * s.parts() * s.matrices() * s.blocks * s.blocks),
        lengths(s.batch) {
    fill_weights(s, seed, weights);
    fill_lengths(s, lengths);
    for (std::uint64_t i = 0; i < 2; ++i) {
      fill_rows(s, seed + 10 * i + 1, x.emplace_back(s.elements()));
      d_y.push_back(Half(s.elements()).fill_random(seed + 10 * i + 2));
      others.push_back(Half(s.elements()).fill_random(seed + 10 * i + 3));
      y.emplace_back(s.elements());
      d_x.emplace_back(s.elements());
    }
  }

  Half weights;
  Float d_weights;
  Array<std::int64_t> lengths;
  std::vector<Half> x, y, d_y, others, d_x;
};

BlockMixParams params_of(const Shape& s, const Tensors& t) {
  const auto rows = [&](const Half& x) {
    const std::int64_t block = s.columns(), head = block * s.blocks;
    return BlockRowsParams{x.words(), {head * s.heads, head, block, s.head_dim}};
  };
  BlockMixParams p{};
  p.dtype = KernelDtype::kBFloat16;
  p.batch = s.batch;
  p.heads = s.heads;
  p.blocks = s.blocks;
  p.block = s.block;
  p.head_dim = s.head_dim;
  p.diagonal = s.diagonal();
  p.weights = t.weights.words();
  p.weight_strides[2] = s.padded();
  p.weight_strides[1] = p.weight_strides[2] * s.blocks;
  p.weight_strides[0] = p.weight_strides[1] * s.heads;
  if (s.padding) {
    p.lengths = t.lengths.get();
    p.second_set = s.set_size();
  }
  p.num_tensors = 2;
  for (std::size_t i = 0; i < 2; ++i) {
    p.x[i] = rows(t.x[i]);
    p.y[i] = rows(t.y[i]);
    p.d_y[i] = rows(t.d_y[i]);
    p.others[i] = rows(t.others[i]);
    p.d_x[i] = rows(t.d_x[i]);
  }
  p.parts = s.parts();
  p.d_weights = t.d_weights.get();
  return p;
}

// y or, if `transposed`, d_x.
template <typename T>
void solve_rows(const Shape& s, const Half& weights, const Half& from, const Element* others,
                bool transposed, const Array<T>& result) {
  T* to = result.get();
  const Element *w = weights.get(), *x = from.get();
  const std::int64_t columns = s.columns(), set_size = s.set_size();
  const int blocks = s.blocks, padded = s.padded();
  for_each(s.elements(), [=] __device__(std::int64_t i) {
    const std::int64_t f = i % columns, matrix = i / columns / blocks;
    const int row = static_cast<int>(i / columns % blocks),
              sample = static_cast<int>(matrix / s.heads);
    const int set = f / s.head_dim < s.split_of(sample) ? 0 : 1, existing = s.existing(sample, set);
    float sum = others == nullptr ? 0 : to_float(others[i]);
    for (int each = 0; each < existing; ++each) {
      const std::int64_t at = set * set_size +
                              (matrix * blocks + (transposed ? each : row)) * padded +
                              (transposed ? row : each);
      sum += to_float(w[at]) * to_float(x[(matrix * blocks + each) * columns + f]);
    }
    to[i] = from_float<T>(sum);
  });
}

void solve_weights(const Shape& s, const Tensors& t, const Float& result) {
  float* to = result.get();
  const Element *x0 = t.x[0].get(), *x1 = t.x[1].get(), *g0 = t.d_y[0].get(), *g1 = t.d_y[1].get();
  const std::int64_t columns = s.columns(), matrices = s.matrices();
  const int blocks = s.blocks, diagonal = s.diagonal();
  for_each(result.size(), [=] __device__(std::int64_t i) {
    const int v = static_cast<int>(i % blocks), u = static_cast<int>(i / blocks % blocks);
    const std::int64_t matrix = i / blocks / blocks % matrices;
    const int set = static_cast<int>(i / blocks / blocks / matrices),
              sample = static_cast<int>(matrix / s.heads);
    const std::int64_t split = std::int64_t{s.split_of(sample)} * s.head_dim,
                       end = set == 0 ? split : columns;
    const bool seen = v <= u + diagonal && v < s.existing(sample, set);
    float sum = 0;
    for (std::int64_t f = set == 0 ? 0 : split; seen && f < end; ++f) {
      const std::int64_t at_u = (matrix * blocks + u) * columns + f,
                         at_v = (matrix * blocks + v) * columns + f;
      sum += to_float(g0[at_u]) * to_float(x0[at_v]) + to_float(g1[at_u]) * to_float(x1[at_v]);
    }
    to[i] = sum;
  });
}

void run(Lab& lab, const Shape& s) {
  const std::string forward_name = "mixing forward", backward_name = "mixing backward";
  if (!lab.wants(forward_name, s.text()) && !lab.wants(backward_name, s.text())) return;
  const std::int64_t unit = 2 * s.elements();
  std::vector<Tensors> tensors;
  std::vector<BlockMixParams> params;
  for (int copy = 0; copy < lab.copies(4 * unit); ++copy) {
    tensors.emplace_back(s, 100 * static_cast<std::uint64_t>(copy));
    params.push_back(params_of(s, tensors.back()));
  }
  const Tensors& t = tensors[0];
  std::vector<Float> y, d_x;
  std::vector<Half> rounded_y, rounded_d_x;
  for (std::size_t i = 0; i < 2; ++i) {
    solve_rows(s, t.weights, t.x[i], nullptr, false, y.emplace_back(s.elements()));
    solve_rows(s, t.weights, t.x[i], nullptr, false, rounded_y.emplace_back(s.elements()));
    solve_rows(s, t.weights, t.d_y[i], t.others[i].get(), true, d_x.emplace_back(s.elements()));
    solve_rows(s, t.weights, t.d_y[i], t.others[i].get(), true,
               rounded_d_x.emplace_back(s.elements()));
  }
  const Float d_w(s.sets() * s.matrices() * s.blocks * s.blocks), sum(d_w.size());
  solve_weights(s, t, d_w);

  const double bytes = static_cast<double>(unit), part = s.causal ? 0.5 : 1;
  const double flops = 2.0 * 2 * s.elements() * s.blocks * part;
  Case forward{forward_name, s.text(), 4 * bytes, flops, 4 * unit};
  forward.launch = [&](int copy, cudaStream_t stream) {
    launch_block_mix(params[static_cast<std::size_t>(copy)], stream);
  };
  forward.outputs = {output("y0", t.y[0], y[0], rounded_y[0]),
                     output("y1", t.y[1], y[1], rounded_y[1])};
  if (lab.wants(forward_name, s.text())) lab.run(forward);

  Case backward{backward_name, s.text(), 10 * bytes, 2 * flops, 8 * unit};
  const int parts = s.parts();
  backward.launch = [&](int copy, cudaStream_t stream) {
    launch_block_mix_backward(params[static_cast<std::size_t>(copy)], stream);
  };
  backward.outputs = {output("d_x0", t.d_x[0], d_x[0], rounded_d_x[0]),
                      output("d_x1", t.d_x[1], d_x[1], rounded_d_x[1])};
  // The parts are summed here; an operation of LibTorch does it in the product.
  Output weights = output("d_w", t.d_weights, d_w, sum);
  weights.kernel = [&, parts] {
    const float* from = t.d_weights.get();
    float* to = sum.get();
    const std::int64_t size = s.matrices() * s.blocks * s.blocks;  // of a set
    for_each(sum.size(), [=] __device__(std::int64_t i) {
      float total = 0;
      for (int each = 0; each < parts; ++each) {
        total += from[(i / size * parts + each) * size + i % size];
      }
      to[i] = total;
    });
    return distance(sum, d_w);
  };
  weights.rounded = [] { return Distance{}; };
  weights.epsilon = 0x1p-16f;  // long fp32 sums in another order
  backward.outputs.push_back(weights);
  if (lab.wants(backward_name, s.text())) lab.run(backward);
}

}  // namespace

void cases(Lab& lab) {
  for (const bool causal : {false, true}) {
    for (const int blocks : {2, 8, 16, 64, 256}) run(lab, {4, 16, blocks, 64, 64, causal});
    run(lab, {4, 16, 32, 128, 64, causal});
  }
  for (const int blocks : {16, 64, 256}) run(lab, {4, 16, blocks, 64, 64, false, true});
}

}  // namespace birkhoff::lab
