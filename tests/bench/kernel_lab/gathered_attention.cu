// Attention over gathered rows on tensor cores, forward and backward: dense attention as one
// segment, buckets that have each row once, and windows of rows that may overlap, whose slots are
// merged.
#include <algorithm>
#include <cmath>

#include "attention/kernels/gathered_attention/gpu_params.h"
#include "tests/bench/kernel_lab/attention.h"

namespace birkhoff::lab {
namespace {

constexpr int kWindow = 256;  // rows of a segment; of a bucket on average

enum class Kind { kDense, kBuckets, kWindows };

struct Shape : AttentionSize {
  Kind kind;
  bool causal = true;

  int segments() const { return kind == Kind::kDense ? 1 : queries / kWindow; }
  bool once() const { return kind != Kind::kWindows; }
  // Heads that have lists of their own.
  int list_batch() const { return kind == Kind::kDense ? 1 : batch; }
  int list_heads() const { return kind == Kind::kDense ? 1 : heads; }
  std::string name() const {
    return kind == Kind::kDense     ? "gathered dense"
           : kind == Kind::kBuckets ? "gathered buckets"
                                    : "gathered windows";
  }
  std::string text() const {
    return AttentionSize::text() +
           (kind == Kind::kDense ? "" : ", " + std::to_string(segments()) + " segments") +
           (causal ? ", causal" : ", encoder");
  }
};

using Indices = std::vector<std::int32_t>;

Array<std::int32_t> on_device(const Indices& x) {
  const Array<std::int32_t> made(static_cast<std::int64_t>(x.size()));
  cuda_check(cudaMemcpy(made.get(), x.data(), static_cast<std::size_t>(made.bytes()),
                        cudaMemcpyHostToDevice),
             "cudaMemcpy");
  return made;
}

// The rows of each segment of a head, ascending. Windows are random rows, each as likely.
std::vector<Indices> random_segments(const Shape& s, std::uint64_t head) {
  std::vector<Indices> segments(static_cast<std::size_t>(s.segments()));
  for (std::uint64_t g = 0; g < segments.size(); ++g) {
    for (int row = 0; row < s.queries; ++row) {
      const std::uint64_t random = mixed(mixed(head * segments.size()) + row);
      if (s.kind != Kind::kWindows) {
        if (random % segments.size() == g) segments[g].push_back(row);
      } else if (mixed(random + g) % static_cast<std::uint64_t>(s.queries - row) <
                 kWindow - segments[g].size()) {
        segments[g].push_back(row);
      }
    }
  }
  return segments;
}

// The lists of queries, which are those of keys, too.
struct Lists {
  explicit Lists(const Shape& s) {
    Indices all_rows, all_ends, all_order, all_starts;
    for (int head = 0; head < s.list_batch() * s.list_heads(); ++head) {
      std::vector<Indices> slots_of(static_cast<std::size_t>(s.queries));
      std::int32_t slot = 0;
      for (const Indices& segment : random_segments(s, static_cast<std::uint64_t>(head))) {
        for (const std::int32_t row : segment) {
          all_rows.push_back(row);
          slots_of[static_cast<std::size_t>(row)].push_back(slot++);
        }
        all_ends.push_back(slot);
        const auto size = static_cast<double>(segment.size());
        pairs += s.causal ? size * (size + 1) / 2 : size * size;
      }
      std::int32_t start = 0;
      for (const Indices& slots : slots_of) {
        all_starts.push_back(start);
        start += static_cast<std::int32_t>(slots.size());
        all_order.insert(all_order.end(), slots.begin(), slots.end());
      }
      all_starts.push_back(start);
    }
    pairs *= s.all_heads() / (s.list_batch() * s.list_heads());
    rows = on_device(all_rows);
    ends = on_device(all_ends);
    order = on_device(all_order);
    starts = on_device(all_starts);
    params.batch = s.list_batch();
    params.heads = s.list_heads();
    params.slots = s.queries;  // of windows, too
    params.rows = s.queries;
    params.once = s.once();
    params.row_of = rows.get();
    params.ends = ends.get();
    params.order = order.get();
    params.starts = starts.get();
  }

  double pairs = 0;  // of a query and a key that it sees, over all heads
  Array<std::int32_t> rows, ends, order, starts;
  GatheredListsParams params{};
};

struct Tensors : AttentionTensors {
  Tensors(const Shape& s, const Lists& lists, std::uint64_t seed) : AttentionTensors(s, seed) {
    params.dtype = KernelDtype::kBFloat16;
    params.tensor_cores = true;
    params.batch = s.batch;
    params.heads = params.key_heads = s.heads;
    params.segments = s.segments();
    params.head_dim = s.head_dim;
    params.scale = s.scale();
    params.queries = params.keys = lists.params;
    constexpr std::int64_t kFar = std::int64_t{1} << 40;  // no limit
    params.least = s.causal ? 0 : -kFar;
    params.most = kFar;
    set_rows(params);
    for (float** each : {&params.max, &params.sum, &params.delta, &params.inverse}) {
      *each = numbers.emplace_back(s.all_queries()).get();
    }
    if (s.once()) {
      params.slot_out = params.out;
      params.d_q_slots = params.d_q;
      params.d_k_slots = params.d_k;
      params.d_v_slots = params.d_v;
      return;
    }
    for (float** each : {&params.slot_max, &params.slot_sum}) {
      *each = numbers.emplace_back(s.all_queries()).get();  // as many slots as rows
    }
    for (RowsParams* each :
         {&params.slot_out, &params.d_q_slots, &params.d_k_slots, &params.d_v_slots}) {
      *each = rows(slots.emplace_back(q.size()));
    }
  }

  std::vector<Float> numbers;
  std::vector<Half> slots;
  GatheredParams params{};
};

void launch_forward(const Tensors& t, cudaStream_t stream) {
  launch_gathered_slots(t.params, stream);
  launch_gathered_merge(t.params, stream);
}

// Weights: a key that a query sees from two slots counts twice.
void solve_weights(const Shape& s, const AllPairs& pairs, const GatheredListsParams& lists) {
  const int segments = s.segments();
  for_each(s.all_queries(), [=] __device__(std::int64_t query) {
    const int row = static_cast<int>(query % pairs.queries), end = s.causal ? row + 1 : pairs.keys;
    const std::int64_t list = lists.batch * lists.heads == 1 ? 0 : query / pairs.queries;
    const std::int32_t *row_of = lists.row_of + list * lists.slots,
                       *ends = lists.ends + list * segments,
                       *order = lists.order + list * lists.slots,
                       *starts = lists.starts + list * (lists.rows + 1);
    for (int n = starts[row]; n < starts[row + 1]; ++n) {
      int segment = 0;
      while (ends[segment] <= order[n]) ++segment;
      for (int slot = segment == 0 ? 0 : ends[segment - 1]; slot < ends[segment]; ++slot) {
        if (row_of[slot] < end) pairs.p[pairs.place(query, row_of[slot])] += 1;
      }
    }
    float largest = -INFINITY;
    double sum = 0;
    for (int key = 0; key < end; ++key) {
      const std::int64_t place = pairs.place(query, key);
      if (pairs.p[place] == 0) continue;
      pairs.d_s[place] = static_cast<float>(pairs.scale * pairs.product(query, key));
      largest = fmaxf(largest, pairs.d_s[place]);
    }
    for (int key = 0; key < end; ++key) {
      const std::int64_t place = pairs.place(query, key);
      if (pairs.p[place] == 0) continue;
      pairs.p[place] *= static_cast<float>(exp(static_cast<double>(pairs.d_s[place]) - largest));
      sum += pairs.p[place];
    }
    for (int key = 0; key < end; ++key) {
      const std::int64_t place = pairs.place(query, key);
      pairs.d_s[place] = 0;
      if (pairs.p[place] != 0) pairs.p[place] = static_cast<float>(pairs.p[place] / sum);
    }
  });
}

// The gradients of scores. They depend on the output, which may be rounded.
template <typename T>
void solve_scores(const Shape& s, const AllPairs& pairs, const Array<T>& output) {
  const T* out = output.get();
  for_each(s.all_queries(), [=] __device__(std::int64_t query) {
    double delta = 0;
    for (int d = 0; d < pairs.head_dim; ++d) {
      const std::int64_t i = query * pairs.head_dim + d;
      delta += static_cast<double>(to_float(out[i])) * to_float(pairs.d_out[i]);
    }
    for (int key = 0; key < pairs.keys; ++key) {
      const std::int64_t place = pairs.place(query, key);
      if (pairs.p[place] == 0) continue;
      pairs.d_s[place] = static_cast<float>(pairs.p[place] * (pairs.gradient(query, key) - delta));
    }
  });
}

void run(Lab& lab, const Shape& s) {
  const std::string forward_name = s.name() + " forward", backward_name = s.name() + " backward";
  if (!lab.wants(forward_name, s.text()) && !lab.wants(backward_name, s.text())) return;
  const std::int64_t unit = s.query_bytes(), of_slots = s.once() ? 0 : 2 * unit;
  const Lists lists(s);
  std::vector<Tensors> tensors;
  for (int copy = 0; copy < lab.copies(4 * unit); ++copy) {
    tensors.emplace_back(s, lists, 100 * static_cast<std::uint64_t>(copy));
  }
  const Tensors& t = tensors[0];
  const Float p(AllPairs::count(s)), d_s(p.size());
  const AllPairs pairs(t, p, d_s);
  solve_weights(s, pairs, lists.params);
  const AttentionResults<float> exact(t);
  const AttentionResults<__nv_bfloat16> rounded(t);
  // The outputs come first: gradients of scores depend on them.
  solve_products<false>(s, pairs, exact);
  solve_scores(s, pairs, exact.out);
  solve_products<false>(s, pairs, exact);
  solve_products<true>(s, pairs, rounded);
  solve_scores(s, pairs, rounded.out);
  solve_products<true>(s, pairs, rounded);

  // Results of slots are written and read again.
  const double product = 2.0 * s.head_dim * lists.pairs;
  Case forward{forward_name, s.text(), static_cast<double>(4 * unit + of_slots), 2 * product,
               4 * unit};
  forward.launch = [&](int copy, cudaStream_t stream) {
    launch_forward(tensors[static_cast<std::size_t>(copy)], stream);
  };
  forward.outputs = {output("out", t.out, exact.out, rounded.out)};
  if (lab.wants(forward_name, s.text())) lab.run(forward);

  // The backward pass reads what the forward pass wrote, in each copy.
  for (const Tensors& each : tensors) launch_forward(each, nullptr);
  Case backward{backward_name, s.text(), static_cast<double>(8 * unit + 3 * of_slots), 5 * product,
                8 * unit};
  backward.launch = [&](int copy, cudaStream_t stream) {
    launch_gathered_attention_backward(tensors[static_cast<std::size_t>(copy)].params, stream);
  };
  backward.outputs = gradient_outputs(t, exact, rounded);
  if (lab.wants(backward_name, s.text())) lab.run(backward);
}

}  // namespace

void cases(Lab& lab) {
  for (const Kind kind : {Kind::kDense, Kind::kBuckets, Kind::kWindows}) {
    for (const int length : {1024, 4096}) run(lab, {{4, 16, length, length, 64}, kind});
    run(lab, {{4, 16, 1024, 1024, 128}, kind});
  }
  run(lab, {{4, 16, 4096, 4096, 64}, Kind::kDense, false});
}

}  // namespace birkhoff::lab
