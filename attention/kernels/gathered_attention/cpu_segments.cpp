// Legend: B batch, H heads, L queries, S keys, D head dim, P slots of a list, T number type, p
// where DistanceBand says a row is.
//
// A segment's keys are copied once to a thread's memory, where they are contiguous tiles for the
// loop. Results belong to slots, so no two threads write to the same memory; cpu_slots.h makes
// results of rows from them.
#include "attention/kernels/gathered_attention/cpu_segments.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "attention/kernels/common/cpu_dtype.h"
#include "attention/kernels/common/cpu_scratch.h"
#include "attention/kernels/gathered_attention/cpu_lists.h"
#include "attention/kernels/gathered_attention/cpu_slots.h"
#include "attention/kernels/relative_positions/cpu_tables.h"
#include "attention/kernels/tile_attention/cpu_loop.h"
#include "attention/kernels/tile_attention/cpu_nan.h"
#include "attention/kernels/tile_attention/cpu_noise.h"

namespace birkhoff {
namespace {

constexpr std::int64_t kNowhere = 1024 * DistanceBand::kFar;  // p of keys that padding hides

// The slots of a segment.
struct Segment {
  Head head;
  std::int64_t first_query, end_query, first_key, end_key;

  std::int64_t num_queries() const { return end_query - first_query; }
  std::int64_t num_keys() const { return end_key - first_key; }
};

// One tile of a segment's queries, or all of them. Neighbouring tasks with one `unit` are work for
// one thread.
struct Task {
  std::size_t segment;
  std::int64_t first_query, end_query, unit;
};

// The minimum and maximum p of a tile.
struct Reach {
  std::int64_t least = std::numeric_limits<std::int64_t>::max(),
               most = std::numeric_limits<std::int64_t>::min();
  void add(std::int64_t p) {
    least = std::min(least, p);
    most = std::max(most, p);
  }
};

template <typename T>
struct Call {
  using S = Sum<T>;

  explicit Call(const GatheredAttention& attention) : in(attention) {}

  const GatheredAttention& in;
  std::int64_t B = in.q_BHLD.size(0), H = in.q_BHLD.size(1), L = in.q_BHLD.size(2),
               D = in.q_BHLD.size(3), key_heads = in.k_BHSD.size(1);
  std::int64_t num_query_slots = in.rows.queries.rows_BHP.size(2),
               num_key_slots = in.rows.keys.rows_BHP.size(2);
  at::TensorOptions sum_options = in.q_BHLD.options().dtype(c10::CppTypeToScalarType<S>::value);
  const TileKernels<T>& kernels = tile_kernels<T>();
  std::vector<Segment> segments = all_segments();
  // Forward; for a mean of slots, the last two also backward.
  at::Tensor slot_out_BHPD;
  Numbers<S> slot_maxima, slot_inverses;
  // Backward.
  at::Tensor d_out_BHLD, rest_BHP, d_q_BHPD, d_k_BHPD, d_v_BHPD;
  Numbers<S> maxima, sums, rests;
  DistanceTables<T> tables{in.relative};
  at::Tensor sink_H =
      in.sink_H.defined() ? in.sink_H.detach().to(sum_options).contiguous() : at::Tensor();
  at::Tensor d_sink_PH;  // of each part of the work, for backward
  const std::int64_t noise_heads = in.drops() ? in.noise_heads() : H;
  std::optional<TileDropout> dropout =
      tile_dropout(in.dropout, in.noise, B, noise_heads* GatheredAttention::kNoiseRow);

  // A thread's memory: the loop's, and the current segment's rows.
  struct Worker {
    ScratchMemory loop, row_memory;
    T *q, *d_out, *k, *v;                 // [kTile or keys, D]
    S max[kTile], inverse_sum[kTile];     // of the whole softmax
    std::vector<std::int64_t> p;          // of the keys
    std::vector<std::int32_t> positions;  // of the keys, for relative positions
    std::int32_t query_positions[kTile];
    TileDistances<T> distances;
    std::vector<Reach> reaches;     // of the tiles of keys
    std::unique_ptr<bool[]> masks;  // of the tiles of keys, [kTile, kTile]
    std::vector<KeyTile<T>> tiles;
    const Segment* segment = nullptr;  // the segment whose keys it holds
  };

  std::vector<Segment> all_segments() const {
    std::vector<Segment> result;
    const std::int64_t G = in.rows.queries.ends_BHG.size(2);
    for (std::int64_t head = 0; head < B * key_heads; ++head) {
      const Head at{head / key_heads, head % key_heads};
      const HeadLists queries(in.rows.queries, at), keys(in.rows.keys, at);
      Segment segment{at, 0, 0, 0, 0};
      for (std::int64_t g = 0; g < G; ++g) {
        segment.first_query = segment.end_query;
        segment.first_key = segment.end_key;
        segment.end_query = queries.ends[g];
        segment.end_key = keys.ends[g];
        result.push_back(segment);
      }
    }
    return result;
  }

  Worker new_worker(bool backward) const {
    std::int64_t most_keys = 0;
    for (const Segment& segment : segments) most_keys = std::max(most_keys, segment.num_keys());
    const std::int64_t tiles = (most_keys + kTile - 1) / kTile;
    const auto rows = static_cast<std::size_t>(2 * (kTile + tiles * kTile) * D);
    Worker worker;
    worker.loop = scratch_memory(
        kernels.scratch_bytes(shape(), backward ? std::max(1, static_cast<int>(tiles)) : 1));
    worker.row_memory = scratch_memory(rows * sizeof(T));
    worker.p.resize(static_cast<std::size_t>(most_keys));
    worker.positions.resize(static_cast<std::size_t>(most_keys));
    worker.reaches.resize(static_cast<std::size_t>(tiles));
    worker.masks.reset(new bool[static_cast<std::size_t>(tiles * kTile * kTile)]);
    worker.q = reinterpret_cast<T*>(worker.row_memory.get());
    worker.d_out = worker.q + kTile * D;
    worker.k = worker.d_out + kTile * D;
    worker.v = worker.k + tiles * kTile * D;
    return worker;
  }

  // Calls work(worker, task) for all tasks. A thread gets neighboring units of about its share of
  // all pairs of queries and keys.
  template <typename Work>
  void for_each(const std::vector<Task>& tasks, bool backward, const Work& work) const {
    std::vector<std::size_t> units;      // the first task of each
    std::vector<std::int64_t> starts{};  // pairs of the units before
    std::int64_t pairs = 0;
    for (std::size_t t = 0; t < tasks.size(); ++t) {
      const Task& task = tasks[t];
      if (t == 0 || task.unit != tasks[t - 1].unit) {
        units.push_back(t);
        starts.push_back(pairs);
      }
      const std::int64_t queries = std::max<std::int64_t>(task.end_query - task.first_query, 1);
      pairs += queries * (1 + segments[task.segment].num_keys());
    }
    units.push_back(tasks.size());
    starts.push_back(pairs);
    at::parallel_for(
        0, pairs, kWorthAThread / (4 * D * group()) + 1, [&](std::int64_t begin, std::int64_t end) {
          Worker worker = new_worker(backward);
          const auto task_at = [&](std::int64_t pair) {
            return units[static_cast<std::size_t>(
                std::lower_bound(starts.begin(), starts.end() - 1, pair) - starts.begin())];
          };
          for (std::size_t t = task_at(begin); t < task_at(end); ++t) work(worker, tasks[t]);
        });
  }

  // Copies rows of x, one for each of `count` entries of `rows`.
  void gather(const at::Tensor& x, Head head, const std::int32_t* rows, std::int64_t count,
              T* to) const {
    const T* base = row_of<T>(x, head, 0);
    const std::int64_t stride = x.stride(2);
    for (std::int64_t i = 0; i < count; ++i) {
      std::memcpy(to + i * D, base + rows[i] * stride, static_cast<std::size_t>(D) * sizeof(T));
    }
  }

  // p of a slot, given its row and its rank in the segment.
  std::int64_t p_of(const at::Tensor& positions_BHL, Head head, std::int64_t row,
                    std::int64_t rank) const {
    if (in.rows.band.of == DistanceBand::Of::kRanks) return rank;
    return positions_BHL.defined() ? numbers_of(positions_BHL, head)[row] : row;
  }

  void load_keys(const Segment& segment, Worker& worker) const {
    if (worker.segment == &segment) return;
    worker.segment = &segment;
    const Head head = segment.head;
    const std::int32_t* rows = HeadLists(in.rows.keys, head).rows + segment.first_key;
    gather(in.k_BHSD, head, rows, segment.num_keys(), worker.k);
    gather(in.v_BHSD, head, rows, segment.num_keys(), worker.v);
    const std::int64_t length = in.key_lengths_B.defined()
                                    ? in.key_lengths_B.const_data_ptr<std::int64_t>()[head.b]
                                    : in.k_BHSD.size(2);
    for (std::int64_t j = 0; j < segment.num_keys(); ++j) {
      if (j % kTile == 0) worker.reaches[static_cast<std::size_t>(j / kTile)] = {};
      std::int64_t& p = worker.p[static_cast<std::size_t>(j)];
      p = rows[j] < length ? p_of(in.rows.band.positions_k_BHS, head, rows[j], j) : kNowhere;
      worker.reaches[static_cast<std::size_t>(j / kTile)].add(p);
      worker.positions[static_cast<std::size_t>(j)] = rows[j];
    }
  }

  // Lists the tiles of the worker's keys that queries at `p_q` see.
  void list_tiles(const std::int64_t* p_q, std::int64_t num_queries, Worker& worker) const {
    const DistanceBand& band = in.rows.band;
    const Segment& segment = *worker.segment;
    Reach queries;
    for (std::int64_t i = 0; i < num_queries; ++i) queries.add(p_q[i]);
    worker.tiles.clear();
    for (std::int64_t first = 0; first < segment.num_keys(); first += kTile) {
      const Reach& keys = worker.reaches[static_cast<std::size_t>(first / kTile)];
      const std::int64_t nearest = queries.least - keys.most, farthest = queries.most - keys.least;
      if (farthest < band.least || nearest > band.most) continue;
      KeyTile<T>& tile = worker.tiles.emplace_back();
      tile.num_keys = static_cast<int>(std::min<std::int64_t>(kTile, segment.num_keys() - first));
      tile.first_element = first;  // of the first row of noise
      tile.k = {worker.k + first * D, D};
      tile.v = {worker.v + first * D, D};
      if (in.relative.defined()) tile.positions = worker.positions.data() + first;
      if (d_k_BHPD.defined()) {
        tile.d_k_sum = {mutable_row_of<S>(d_k_BHPD, segment.head, segment.first_key + first), D};
        tile.d_v_sum = {mutable_row_of<S>(d_v_BHPD, segment.head, segment.first_key + first), D};
      }
      if (nearest >= band.least && farthest <= band.most) continue;
      bool* mask = worker.masks.get() + first * kTile;
      const std::int64_t* p_k = worker.p.data() + first;
      for (std::int64_t i = 0; i < num_queries; ++i) {
        for (std::int64_t j = 0; j < tile.num_keys; ++j) {
          const std::int64_t distance = p_q[i] - p_k[j];
          mask[i * kTile + j] = distance >= band.least && distance <= band.most;
        }
      }
      tile.mask = mask;
      tile.mask_query_stride = kTile;
      tile.mask_key_stride = 1;
    }
  }

  // Lists the keys of the queries at slots [first, ..), and calls work(queries, head) with these
  // queries of each query head.
  template <typename Work>
  void for_each_head(const Task& task, std::int64_t first, Worker& worker, const Work& work) const {
    const Segment& segment = segments[task.segment];
    load_keys(segment, worker);
    const DistanceBand& band = in.rows.band;
    const std::int64_t count = std::min<std::int64_t>(kTile, task.end_query - first);
    const std::int32_t* rows = HeadLists(in.rows.queries, segment.head).rows + first;
    std::int64_t p_q[kTile];
    for (std::int64_t i = 0; i < count; ++i) {
      p_q[i] = p_of(band.positions_q_BHL, segment.head, rows[i], first + i - segment.first_query);
      worker.query_positions[i] = rows[i];
    }
    list_tiles(p_q, count, worker);
    for (std::int64_t h = segment.head.h * group(); h < (segment.head.h + 1) * group(); ++h) {
      const Head head{segment.head.b, h};
      QueryTile<T> queries;
      queries.num_queries = static_cast<int>(count);
      gather(in.q_BHLD, head, rows, count, worker.q);
      queries.q = {worker.q, D};
      if (in.relative.defined()) {
        worker.distances = tables.of(h, sums_of(task));
        queries.relative = &worker.distances;
        queries.positions = worker.query_positions;
      }
      if (sink_H.defined()) queries.sink = sink_H.const_data_ptr<S>() + h;
      if (d_sink_PH.defined()) {
        queries.d_sink = d_sink_PH.mutable_data_ptr<double>() + sums_of(task) * H + h;
      }
      if (dropout) {
        queries.sample_id = static_cast<std::uint64_t>(
            in.noise->sample_ids_B.const_data_ptr<std::int64_t>()[head.b]);
        constexpr std::int64_t kNoiseRow = GatheredAttention::kNoiseRow;
        for (KeyTile<T>& tile : worker.tiles) {
          const std::int64_t rank = tile.first_element % kNoiseRow;
          tile.first_element = (first * noise_heads + in.noise->first_head + h) * kNoiseRow + rank;
        }
      }
      work(queries, head);
    }
  }

  std::int64_t group() const { return H / key_heads; }
  // The number of units of the backward pass per key head. Sums for tables take memory: with them,
  // there are only as many units as keep threads busy.
  std::int64_t units_of_head() const {
    constexpr std::int64_t kEnoughTasks = 256;
    const std::int64_t G = in.rows.queries.ends_BHG.size(2);
    if (!in.relative.defined() && !sink_H.defined()) return G;
    return std::clamp<std::int64_t>(kEnoughTasks / (B * key_heads), 1,
                                    std::max<std::int64_t>(G, 1));
  }
  // The index of the sums that get the gradients of tables and sinks of this task.
  std::int64_t sums_of(const Task& task) const {
    const std::int64_t units = units_of_head();
    return task.unit / units / key_heads * units + task.unit % units;
  }

  TileShape shape() const {
    return {.head_dim = static_cast<int>(D),
            .scale = in.scale(),
            .dropout = dropout ? &*dropout : nullptr,
            .num_distances = tables.num_distances()};
  }

  void attend_slots(Worker& worker, const Task& task) const {
    for_each_head(task, task.first_query, worker, [&](QueryTile<T>& queries, Head head) {
      queries.out_sum = {mutable_row_of<S>(slot_out_BHPD, head, task.first_query), D};
      queries.max = &slot_maxima.at(head, task.first_query);
      queries.inverse_sum = &slot_inverses.at(head, task.first_query);
      attend_tile(kernels, shape(), queries, worker.tiles.data(),
                  static_cast<int>(worker.tiles.size()), worker.loop.get());
    });
  }

  // Query i of the worker has this row and slot.
  void set_softmax(Worker& worker, int i, Head head, std::int64_t row, std::int64_t slot) const {
    const S sum = sums.at(head, row);
    if (in.merge == SlotMerge::kMean) {  // sum: the slots that it is the mean of
      worker.max[i] = slot_maxima.at(head, slot);
      worker.inverse_sum[i] = sum != 0 ? slot_inverses.at(head, slot) / sum : 0;
    } else {
      worker.max[i] = maxima.at(head, row);
      worker.inverse_sum[i] = sum != 0 ? 1 / sum : 0;
    }
  }

  void add_gradients_of_segment(Worker& worker, const Task& task) const {
    const Segment& segment = segments[task.segment];
    for (const at::Tensor* of_keys : {&d_k_BHPD, &d_v_BHPD}) {
      std::fill_n(mutable_row_of<S>(*of_keys, segment.head, segment.first_key),
                  segment.num_keys() * D, S{0});
    }
    for (std::int64_t first = task.first_query; first < task.end_query; first += kTile) {
      const std::int32_t* rows = HeadLists(in.rows.queries, segment.head).rows + first;
      for_each_head(task, first, worker, [&](QueryTile<T>& queries, Head head) {
        gather(d_out_BHLD, head, rows, queries.num_queries, worker.d_out);
        for (int i = 0; i < queries.num_queries; ++i)
          set_softmax(worker, i, head, rows[i], first + i);
        queries.d_out = {worker.d_out, D};
        queries.max = worker.max;
        queries.inverse_sum = worker.inverse_sum;
        if (rests.data) queries.rest = &rests.at(head, first);
        queries.d_q_sum = {mutable_row_of<S>(d_q_BHPD, head, first), D};
        std::fill_n(queries.d_q_sum.data, queries.num_queries * D, S{0});
        add_tile_gradients(kernels, shape(), queries, worker.tiles.data(),
                           static_cast<int>(worker.tiles.size()), worker.loop.get());
      });
    }
  }

  GatheredResults run_forward() {
    const at::Tensor softmax_2BHP = at::empty({2, B, H, num_query_slots}, sum_options);
    slot_out_BHPD = at::empty({B, H, num_query_slots, D}, sum_options);
    slot_maxima = Numbers<S>(softmax_2BHP[0]);
    slot_inverses = Numbers<S>(softmax_2BHP[1]);
    std::vector<Task> tasks;
    for (std::size_t s = 0; s < segments.size(); ++s) {
      for (std::int64_t first = segments[s].first_query; first < segments[s].end_query;
           first += kTile) {
        tasks.push_back({s, first, std::min(first + kTile, segments[s].end_query),
                         static_cast<std::int64_t>(tasks.size())});
      }
    }
    for_each(tasks, /*backward=*/false,
             [&](Worker& worker, const Task& task) { attend_slots(worker, task); });
    const SlotResults slots{slot_out_BHPD, softmax_2BHP};
    return {merge_slots(in, slots), slots};
  }

  GatheredGradients run_backward() {
    d_q_BHPD = at::empty({B, H, num_query_slots, D}, sum_options);
    d_k_BHPD = at::empty({B, key_heads, num_key_slots, D}, sum_options);
    d_v_BHPD = at::empty_like(d_k_BHPD);
    const std::int64_t G = in.rows.queries.ends_BHG.size(2), units = units_of_head();
    tables.start_gradients(B * units, H);
    if (sink_H.defined()) d_sink_PH = at::zeros({B * units, H}, at::kDouble);
    std::vector<Task> tasks;
    for (std::size_t s = 0; s < segments.size(); ++s) {
      const auto number = static_cast<std::int64_t>(s), head = number / G;
      tasks.push_back({s, segments[s].first_query, segments[s].end_query,
                       head * units + number % G * units / G});
    }
    for_each(tasks, /*backward=*/true,
             [&](Worker& worker, const Task& task) { add_gradients_of_segment(worker, task); });
    const auto of_tables = tables.gradients(shape().scale, dropout ? dropout->scale : 1);
    return {
        .d_q_BHLD = add_slots(in.rows.queries, d_q_BHPD, in.q_BHLD),
        .d_k_BHSD = add_slots(in.rows.keys, d_k_BHPD, in.k_BHSD),
        .d_v_BHSD = add_slots(in.rows.keys, d_v_BHPD, in.v_BHSD),
        .d_relative_keys_HRD = of_tables.d_keys_HRD,
        .d_relative_values_HRD = of_tables.d_values_HRD,
        .d_sink_H = sink_H.defined() ? d_sink_PH.sum(0).to(in.sink_H.scalar_type()) : at::Tensor(),
        .d_relative_bias_HR = of_tables.d_bias_HR};
  }
};

}  // namespace

// If no query has two slots, there is nothing to merge, and results of slots are not kept.
GatheredResults attend_in_segments(GatheredAttention in) {
  const at::Tensor slots_BHL = in.rows.queries.starts_BHR.diff();
  // A sink takes part in the softmax of each single slot only with a mean.
  const bool merges = slots_BHL.max().item<std::int32_t>() > 1 || in.sink_H.defined();
  if (!merges) in.merge = SlotMerge::kOneSoftmax;
  GatheredResults results;
  dispatch_tile_type(in.q_BHLD.scalar_type(),
                     [&]<typename T>(T) { results = Call<T>(in).run_forward(); });
  if (!merges) results.slots = {};
  return results;
}

GatheredGradients gradients_in_segments(GatheredAttention in, const GatheredResults& results,
                                        const at::Tensor& d_out_BHLD, const at::Tensor& d_sum_BHL) {
  const bool merged = results.slots.out_BHPD.defined();
  if (!merged) in.merge = SlotMerge::kOneSoftmax;
  GatheredGradients gradients;
  dispatch_tile_type(in.q_BHLD.scalar_type(), [&]<typename T>(T) {
    Call<T> call(in);
    call.d_out_BHLD = d_out_BHLD;
    using S = Sum<T>;
    call.maxima = Numbers<S>(results.part.max_BHL);
    call.sums = Numbers<S>(results.part.sum_BHL);
    if (in.merge == SlotMerge::kMean) {
      call.slot_maxima = Numbers<S>(results.slots.softmax_2BHP[0]);
      call.slot_inverses = Numbers<S>(results.slots.softmax_2BHP[1]);
    }
    if (merged || d_sum_BHL.defined()) {
      call.rest_BHP = rests_of_slots(in, results, d_out_BHLD, d_sum_BHL);
      call.rests = Numbers<S>(call.rest_BHP);
    }
    gradients = call.run_backward();
  });
  return gradients;
}

}  // namespace birkhoff
