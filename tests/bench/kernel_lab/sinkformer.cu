// Doubly stochastic attention, forward and backward, without and with padding.
#include <algorithm>
#include <cmath>

#include "attention/kernels/sinkformer/gpu_params.h"
#include "tests/bench/kernel_lab/attention.h"

namespace birkhoff::lab {
namespace {

struct Shape : AttentionSize {
  int half_steps;
  bool padding = false;

  // Rows of a sample that exist, of `rows` queries or keys; only the first sample has all of them.
  __host__ __device__ int length_of(int rows, int sample) const {
    return padding ? rows - sample * (rows / batch - 5) : rows;
  }
  double pairs() const {
    double sum = 0;
    for (int sample = 0; sample < batch; ++sample) {
      sum += static_cast<double>(length_of(queries, sample)) * length_of(keys, sample);
    }
    return heads * sum;
  }
  std::string text() const {
    return AttentionSize::text() + ", T " + std::to_string(half_steps) +
           (padding ? ", padding" : "");
  }
};

void fill_lengths(const Shape& s, int rows, const Array<std::int64_t>& lengths) {
  std::int64_t* to = lengths.get();
  for_each(lengths.size(),
           [=] __device__(std::int64_t i) { to[i] = s.length_of(rows, static_cast<int>(i)); });
}

struct Tensors : AttentionTensors {
  Tensors(const Shape& s, std::uint64_t seed)
      : AttentionTensors(s, seed), query_lengths(s.batch), key_lengths(s.batch) {
    fill_lengths(s, s.queries, query_lengths);
    fill_lengths(s, s.keys, key_lengths);
    params.dtype = KernelDtype::kBFloat16;
    params.batch = s.batch;
    params.heads = s.heads;
    params.head_dim = s.head_dim;
    params.scale = s.scale();
    params.half_steps = s.half_steps;
    params.unrolled = true;
    params.out = rows(out);
    params.d_v = rows(d_v);
    params.queries = side(s, s.queries, s.half_steps / 2 + 1, query_lengths);
    params.queries.rows = rows(q);
    params.queries.values = rows(d_out);
    params.queries.d_rows = rows(d_q);
    params.keys = side(s, s.keys, s.half_steps / 2, key_lengths);
    params.keys.rows = rows(k);
    params.keys.values = rows(v);
    params.keys.d_rows = rows(d_k);
  }

  Array<std::int64_t> query_lengths, key_lengths;
  std::vector<Float> vectors;
  SinkformerParams params{};

 private:
  SinkformerSide side(const Shape& s, int size, int count, const Array<std::int64_t>& lengths) {
    SinkformerSide made{};
    made.size = size;
    made.lengths = s.padding ? lengths.get() : nullptr;
    made.vectors = count;
    const std::int64_t elements = s.all_heads() * count * made.padded();
    made.potentials = vectors.emplace_back(elements).get();
    made.coefficients = vectors.emplace_back(elements).get();
    return made;
  }
};

// The formulas of attention/kernels/sinkformer/sinkformer.h and their gradients. Potentials and
// their gradients are [T + 1, B H, L or S]; those of half-step 0 are 0. Until the end p holds
// scores and d_s the gradients of weights.
struct Slow : AllPairs {
  Slow(const Shape& s, const Tensors& t, const Float& weights, const Float& score_gradients,
       const Array<double>& all_potentials, const Array<double>& all_gradients)
      : AllPairs(t, weights, score_gradients),
        all_heads(s.all_heads()),
        most(std::max(s.queries, s.keys)),
        query_lengths(t.query_lengths.get()),
        key_lengths(t.key_lengths.get()),
        potentials(all_potentials.get()),
        gradients(all_gradients.get()) {
    all_potentials.zero();
    all_gradients.zero();
  }
  static std::int64_t vectors(const Shape& s) {
    return (s.half_steps + 1) * s.all_heads() * std::max(s.queries, s.keys);
  }

  // Rows of the side that half-step t normalizes: queries if t is odd.
  __device__ int length(int t, std::int64_t head) const {
    return static_cast<int>((t % 2 == 1 ? query_lengths : key_lengths)[head / heads]);
  }
  // n / m, the sum of a row of keys, where a row of queries sums to 1.
  __device__ double mass(int t, std::int64_t head) const {
    return t % 2 == 1 ? 1 : static_cast<double>(length(1, head)) / length(2, head);
  }
  __device__ std::int64_t at(int t, std::int64_t head, int row) const {
    return (t * all_heads + head) * most + row;
  }
  // The pair of a row that half-step t normalizes and a row of the other side.
  __device__ std::int64_t pair(int t, std::int64_t head, int row, int other) const {
    return t % 2 == 1 ? place(head * queries + row, other) : place(head * queries + other, row);
  }
  // exp(S + f + g) with the potentials of half-steps t and t - 1.
  __device__ double entry(int t, std::int64_t head, int row, int other) const {
    return exp(p[pair(t, head, row, other)] + potentials[at(t, head, row)] +
               potentials[at(t - 1, head, other)]);
  }

  std::int64_t all_heads;
  int most;
  const std::int64_t *query_lengths, *key_lengths;
  double *potentials, *gradients;
};

// f(head, row) for each row that half-step t normalizes.
template <typename Function>
void for_each_row(const Slow& slow, int t, Function f) {
  const int rows = t % 2 == 1 ? slow.queries : slow.keys;
  for_each(slow.all_heads * rows, [=] __device__(std::int64_t i) {
    const std::int64_t head = i / rows;
    const int row = static_cast<int>(i % rows);
    if (row < slow.length(t, head)) f(head, row);
  });
}
// f(head, query, key) for each pair.
template <typename Function>
void for_each_pair(const Slow& slow, Function f) {
  for_each_row(slow, 1, [=] __device__(std::int64_t head, int query) {
    for (int key = 0; key < slow.length(2, head); ++key) f(head, query, key);
  });
}

void take_potentials(const Slow& slow, int t) {
  for_each_row(slow, t, [=] __device__(std::int64_t head, int row) {
    const int others = slow.length(t + 1, head);
    const auto term = [&](int other) {
      return slow.p[slow.pair(t, head, row, other)] + slow.potentials[slow.at(t - 1, head, other)];
    };
    double largest = -INFINITY, sum = 0;
    for (int other = 0; other < others; ++other) largest = fmax(largest, term(other));
    for (int other = 0; other < others; ++other) sum += exp(term(other) - largest);
    slow.potentials[slow.at(t, head, row)] = log(slow.mass(t, head)) - largest - log(sum);
  });
}

// The gradient of the potential of half-step t of T.
void take_gradients(const Slow& slow, int t, int half_steps) {
  for_each_row(slow, t, [=] __device__(std::int64_t head, int row) {
    double sum = 0;
    for (int other = 0; other < slow.length(t + 1, head); ++other) {
      if (t == half_steps) {
        sum += slow.entry(t, head, row, other) * slow.d_s[slow.pair(t, head, row, other)];
        continue;
      }
      double d = -slow.gradients[slow.at(t + 1, head, other)] / slow.mass(t + 1, head);
      if (t + 1 == half_steps) d += slow.d_s[slow.pair(t, head, row, other)];
      sum += slow.entry(t + 1, head, other, row) * d;
    }
    slow.gradients[slow.at(t, head, row)] = sum;
  });
}

void solve(const Slow& slow, int half_steps) {
  for_each_pair(slow, [=] __device__(std::int64_t head, int query, int key) {
    const std::int64_t number = head * slow.queries + query, place = slow.place(number, key);
    slow.p[place] = static_cast<float>(slow.scale * slow.product(number, key));
    slow.d_s[place] = static_cast<float>(slow.gradient(number, key));
  });
  for (int t = 1; t <= half_steps; ++t) take_potentials(slow, t);
  for (int t = half_steps; t >= 1; --t) take_gradients(slow, t, half_steps);
  for_each_pair(slow, [=] __device__(std::int64_t head, int query, int key) {
    const std::int64_t place = slow.pair(1, head, query, key);
    const double weight = slow.entry(half_steps, head, query, key);
    double d_s = weight * slow.d_s[place];
    for (int t = 1; t <= half_steps; ++t) {
      const int row = t % 2 == 1 ? query : key, other = t % 2 == 1 ? key : query;
      d_s -= slow.entry(t, head, row, other) / slow.mass(t, head) *
             slow.gradients[slow.at(t, head, row)];
    }
    slow.p[place] = static_cast<float>(weight);
    slow.d_s[place] = static_cast<float>(d_s);
  });
}

void run(Lab& lab, const Shape& s) {
  const std::string forward_name = "sinkformer forward", backward_name = "sinkformer backward";
  if (!lab.wants(forward_name, s.text()) && !lab.wants(backward_name, s.text())) return;
  const std::int64_t unit = s.query_bytes();
  std::vector<Tensors> tensors;
  for (int copy = 0; copy < lab.copies(4 * unit); ++copy) {
    tensors.emplace_back(s, 100 * static_cast<std::uint64_t>(copy));
  }
  const Tensors& t = tensors[0];
  const Float p(Slow::count(s)), d_s(p.size());
  const Array<double> potentials(Slow::vectors(s)), gradients(potentials.size());
  const Slow slow(s, t, p, d_s, potentials, gradients);
  solve(slow, s.half_steps);
  const AttentionResults<float> exact(t);
  const AttentionResults<__nv_bfloat16> rounded(t);
  solve_products<false>(s, slow, exact);
  solve_products<true>(s, slow, rounded);

  // docs/benchmarks/gpu.md, "Predicted: doubly stochastic attention", counts these.
  const double bytes = static_cast<double>(unit), product = 2.0 * s.head_dim * s.pairs();
  Case forward{forward_name, s.text(), (2 * s.half_steps + 2) * bytes, (s.half_steps + 1) * product,
               4 * unit};
  forward.launch = [&](int copy, cudaStream_t stream) {
    launch_sinkformer(tensors[static_cast<std::size_t>(copy)].params, stream);
  };
  forward.outputs = {output("out", t.out, exact.out, rounded.out)};
  // The kernels write only rows that exist.
  if (s.padding) forward.outputs[0].poison = [x = t.out] { x.zero(); };
  if (lab.wants(forward_name, s.text())) lab.run(forward);

  // The backward pass reads what the forward pass wrote, in each copy.
  for (const Tensors& each : tensors) launch_sinkformer(each.params, nullptr);
  Case backward{backward_name, s.text(), (2 * s.half_steps + 15) * bytes,
                (s.half_steps + 9) * product, 7 * unit};
  backward.launch = [&](int copy, cudaStream_t stream) {
    launch_sinkformer_backward(tensors[static_cast<std::size_t>(copy)].params, stream);
  };
  backward.outputs = gradient_outputs(t, exact, rounded);
  const Half written[] = {t.d_q, t.d_k, t.d_v};
  for (std::size_t i = 0; s.padding && i < 3; ++i) {
    backward.outputs[i].poison = [x = written[i]] { x.zero(); };
  }
  if (lab.wants(backward_name, s.text())) lab.run(backward);
}

}  // namespace

void cases(Lab& lab) {
  run(lab, {{4, 16, 1024, 1024, 64}, 3});
  run(lab, {{4, 16, 4096, 4096, 64}, 3});
  run(lab, {{4, 16, 1024, 1024, 128}, 3});
  run(lab, {{4, 16, 1000, 1000, 64}, 5, true});
}

}  // namespace birkhoff::lab
