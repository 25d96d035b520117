// Legend: B batch, H heads, N blocks, b tokens per block, D head dim, T number type.
#include "attention/kernels/block_attention/cpu_tasks.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <vector>

#include "attention/kernels/block_attention/cpu_key_source.h"
#include "attention/kernels/common/cpu_dtype.h"
#include "attention/kernels/common/cpu_scratch.h"
#include "attention/kernels/relative_positions/cpu_tables.h"
#include "attention/kernels/tile_attention/cpu_loop.h"
#include "attention/kernels/tile_attention/cpu_nan.h"
#include "attention/kernels/tile_attention/cpu_noise.h"

namespace birkhoff {
namespace {

enum class Pass { kForward, kBackward };

// All tensors of one call; tensors that only the other pass needs are undefined.
template <typename T>
struct Call {
  std::int64_t batch, heads, key_heads, num_blocks, block, head_dim;
  BlockRows<const T> q, d_out;
  BlockRows<T> out, d_q;
  Sum<T>*max_BHNb, *inverse_sum_BHNb;
  std::optional<TileDropout> dropout;
  at::Tensor sample_ids_B;  // defined with dropout
  std::int64_t first_head;  // of the noise
  std::vector<KeySource<T>> sources;
  DistanceTables<T> tables;
  std::vector<std::int32_t> positions;  // 0, 1, ..; empty without relative positions
  std::vector<Sum<T>> sinks;            // of each query head; empty: none
  std::vector<double> d_sinks;          // [parts, heads], for backward
  const TileKernels<T>& kernels = tile_kernels<T>();

  // A thread's memory.
  struct Worker {
    ScratchMemory scratch, sums_memory;
    std::vector<KeySums<T>> sums;  // of each source
    std::vector<KeyTile<T>> tiles;
  };

  // Blocks of queries [begin, end) of one key head; `index` is its index among the runs of that
  // head.
  struct Run {
    std::int64_t batch, head, index, begin, end;
    std::int64_t part;  // the part whose sums get the gradients of tables and sinks
  };

  std::int64_t tiles_per_block() const { return (block + kTile - 1) / kTile; }
  std::int64_t group() const { return heads / key_heads; }
  TileShape shape() const {
    return {static_cast<int>(head_dim), 1 / std::sqrt(static_cast<double>(head_dim)),
            dropout ? &*dropout : nullptr, tables.num_distances()};
  }

  // The blocks of a source whose sums are in scratch.
  std::int64_t reach_of(const KeySource<T>& source) const {
    return std::min(source.reach(), num_blocks);
  }

  Worker worker(Pass pass) const {
    std::int64_t num_tiles = 0, num_sums = 0;
    for (const KeySource<T>& source : sources) {
      num_tiles += source.window.num_offsets() * tiles_per_block();
      if (source.summed) num_sums += reach_of(source) * 2 * block * head_dim;
    }
    if (pass == Pass::kForward) num_tiles = 1;  // forward keeps nothing of earlier tiles
    Worker worker{
        .scratch = scratch_memory(kernels.scratch_bytes(shape(), static_cast<int>(num_tiles))),
        .sums_memory = scratch_memory(static_cast<std::size_t>(num_sums) * sizeof(Sum<T>)),
        .sums = {},
        .tiles = {}};
    auto* data = reinterpret_cast<Sum<T>*>(worker.sums_memory.get());
    for (const KeySource<T>& source : sources) {
      KeySums<T>& sums = worker.sums.emplace_back();
      sums.block = block;
      if (source.chosen.defined()) sums.unwanted.resize(static_cast<std::size_t>(head_dim));
      if (!source.summed) continue;
      sums.data = data;
      sums.reach = reach_of(source);
      sums.head_dim = head_dim;
      data += sums.reach * sums.block_size();
    }
    return worker;
  }

  // Runs one tile of queries: the queries of block n from `first` on, of query head h.
  void attend_tile(Pass pass, std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t first,
                   std::int64_t part, Worker& worker) {
    QueryTile<T> queries;
    queries.num_queries = static_cast<int>(std::min<std::int64_t>(kTile, block - first));
    queries.q = q.rows(b, h, n, first);
    queries.out = out.rows(b, h, n, first);
    const std::int64_t row = ((b * heads + h) * num_blocks + n) * block + first;
    queries.max = max_BHNb + row;
    queries.inverse_sum = inverse_sum_BHNb + row;
    queries.d_out = d_out.rows(b, h, n, first);
    queries.d_q = d_q.rows(b, h, n, first);
    TileDistances<T> distances;
    if (tables.num_distances() > 0) {
      distances = tables.of(h, part);
      queries.relative = &distances;
      queries.positions = positions.data() + n * block + first;
    }
    if (!sinks.empty()) {
      queries.sink = &sinks[static_cast<std::size_t>(h)];
      if (!d_sinks.empty()) {
        queries.d_sink = &d_sinks[static_cast<std::size_t>(part * heads + h)];
      }
    }
    std::vector<KeyTile<T>>& tiles = worker.tiles;
    tiles.clear();
    for (std::size_t s = 0; s < sources.size(); ++s) {
      sources[s].add_tiles(b, h / group(), n, num_blocks, block, first,
                           queries.relative ? positions.data() : nullptr,
                           worker.sums[sources[s].shared.value_or(s)], tiles);
    }
    if (dropout) {
      queries.sample_id =
          static_cast<std::uint64_t>(sample_ids_B.const_data_ptr<std::int64_t>()[b]);
      // A sample's noise is [H, N, b, columns].
      const std::int64_t of_sample = row + (first_head - b * heads) * num_blocks * block;
      for (KeyTile<T>& tile : tiles) {
        tile.first_element += of_sample * dropout->query_stride;
      }
    }
    (pass == Pass::kForward ? &birkhoff::attend_tile<T>
                            : &add_tile_gradients<T>)(kernels, shape(), queries, tiles.data(),
                                                      static_cast<int>(tiles.size()),
                                                      worker.scratch.get());
  }

  // Minimum number of tasks per thread, if each task multiplies `flops`: starting a thread pays off
  // from about ten microseconds of work.
  static std::int64_t grain_of(std::int64_t flops) {
    return 1'000'000 / std::clamp<std::int64_t>(flops, 1, 1'000'000);
  }

  // A task is one tile of queries. Tiles of one block read the same keys, and the heads of a token
  // are adjacent in memory, so tasks follow that order. A block's first and last tiles alternate:
  // in a causal block the last tiles see the most keys, and each thread gets neighboring tasks.
  void run_forward() {
    std::int64_t num_key_blocks = 0;
    for (const KeySource<T>& source : sources) num_key_blocks += source.window.num_offsets();
    const std::int64_t tiles = tiles_per_block();
    at::parallel_for(
        0, batch * num_blocks * tiles * heads,
        grain_of(4 * std::min<std::int64_t>(block, kTile) * block * num_key_blocks * head_dim),
        [&](std::int64_t begin, std::int64_t end) {
          Worker thread = worker(Pass::kForward);
          for (std::int64_t task = begin; task < end; ++task) {
            const std::int64_t turn = task % tiles, h = task / tiles % heads,
                               n = task / tiles / heads % num_blocks,
                               b = task / tiles / heads / num_blocks;
            const std::int64_t tile = turn % 2 == 0 ? turn / 2 : tiles - 1 - turn / 2;
            attend_tile(Pass::kForward, b, h, n, tile * kTile, /*part=*/0, thread);
          }
        });
  }

  // A task is a part of the runs of one key head; a run is consecutive blocks. No two tasks write
  // to the same memory: sums of keys that two runs see wait in border_sums, and each part has its
  // own sums for tables and sinks. So there are no atomics, and the order of the sums does not
  // depend on the number of threads.
  void run_backward() {
    constexpr std::int64_t kMinRun = 8;  // longer runs have fewer blocks at borders
    std::int64_t run_length = 1, num_key_blocks = 0;
    for (const KeySource<T>& source : sources) {
      if (source.summed) run_length = std::max({run_length, kMinRun, source.reach() - 1});
      if (source.chosen.defined()) run_length = num_blocks;
      num_key_blocks += source.window.num_offsets();
    }
    const std::int64_t num_runs = (num_blocks + run_length - 1) / run_length;
    for (KeySource<T>& source : sources) {
      if (!source.summed) continue;
      source.border_sums =
          at::empty({2, batch, key_heads, num_runs - 1, source.reach() - 1, 2, block, head_dim},
                    c10::CppTypeToScalarType<Sum<T>>::value);
    }
    // Sums for tables take memory: with them, there are only as many parts as keep threads busy.
    constexpr std::int64_t kEnoughTasks = 256;
    const bool sums_of_parts = tables.num_distances() > 0 || !sinks.empty();
    const std::int64_t num_parts =
        sums_of_parts ? std::clamp<std::int64_t>(kEnoughTasks / (batch * key_heads), 1, num_runs)
                      : num_runs;
    tables.start_gradients(batch * num_parts, heads);
    if (!sinks.empty()) d_sinks.assign(static_cast<std::size_t>(batch * num_parts * heads), 0);
    const std::int64_t grain =
        grain_of(4 * num_blocks / num_parts * group() * block * block * num_key_blocks * head_dim);
    at::parallel_for(0, batch * num_parts * key_heads, grain,
                     [&](std::int64_t begin, std::int64_t end) {
                       Worker thread = worker(Pass::kBackward);
                       for (std::int64_t task = begin; task < end; ++task) {
                         const std::int64_t part = task / key_heads % num_parts,
                                            b = task / key_heads / num_parts;
                         for (std::int64_t index = part * num_runs / num_parts;
                              index < (part + 1) * num_runs / num_parts; ++index) {
                           attend_run({.batch = b,
                                       .head = task % key_heads,
                                       .index = index,
                                       .begin = index * run_length,
                                       .end = std::min((index + 1) * run_length, num_blocks),
                                       .part = b * num_parts + part},
                                      thread);
                         }
                       }
                     });
    for (const KeySource<T>& source : sources) {
      if (source.summed) add_borders(source, run_length);
    }
  }

  void attend_run(const Run& run, Worker& worker) {
    for (std::size_t s = 0; s < sources.size(); ++s) {
      if (!sources[s].summed_in_place) continue;
      worker.sums[s].written.assign(static_cast<std::size_t>(num_blocks * tiles_per_block()), 0);
    }
    for (std::int64_t n = run.begin; n < run.end; ++n) {
      for (std::size_t s = 0; s < sources.size(); ++s) {
        if (!sources[s].summed) continue;
        const KeyWindow& window = sources[s].summed_window;
        const std::int64_t first = n == run.begin ? window.first_offset : window.last_offset;
        for_key_blocks(n + first, n + window.last_offset, [&](std::int64_t m) {
          std::fill_n(worker.sums[s].of(m), worker.sums[s].block_size(), Sum<T>{0});
        });
      }
      for (std::int64_t head = run.head * group(); head < (run.head + 1) * group(); ++head) {
        for (std::int64_t first = 0; first < block; first += kTile) {
          attend_tile(Pass::kBackward, run.batch, head, n, first, run.part, worker);
        }
      }
      for (std::size_t s = 0; s < sources.size(); ++s) {
        if (!sources[s].summed) continue;
        const KeyWindow& window = sources[s].summed_window;
        const std::int64_t last = n + 1 == run.end ? window.last_offset : window.first_offset;
        for_key_blocks(n + window.first_offset, n + last,
                       [&](std::int64_t m) { leave(sources[s], worker.sums[s], run, m); });
      }
    }
    for (std::size_t s = 0; s < sources.size(); ++s) {
      if (sources[s].summed_in_place) clear_unseen(sources[s], worker.sums[s], run);
    }
  }

  // Sets the gradients of keys that no query has seen to 0.
  void clear_unseen(const KeySource<T>& source, const KeySums<T>& sums, const Run& run) const {
    for (std::size_t tile = 0; tile < sums.written.size(); ++tile) {
      if (sums.written[tile]) continue;
      const std::int64_t m = static_cast<std::int64_t>(tile) / tiles_per_block(),
                         first = static_cast<std::int64_t>(tile) % tiles_per_block() * kTile;
      for (std::int64_t row = first; row < std::min(first + kTile, block); ++row) {
        std::fill_n(source.d_k.rows(run.batch, run.head, m, row).data, head_dim, T{});
        std::fill_n(source.d_v.rows(run.batch, run.head, m, row).data, head_dim, T{});
      }
    }
  }

  // Calls f(m) for the blocks m in [first, last] that exist.
  template <typename F>
  void for_key_blocks(std::int64_t first, std::int64_t last, F f) const {
    for (std::int64_t m = std::max<std::int64_t>(first, 0); m <= std::min(last, num_blocks - 1);
         ++m) {
      f(m);
    }
  }

  // Called when no later query of the run sees block m.
  void leave(const KeySource<T>& source, const KeySums<T>& sums, const Run& run,
             std::int64_t m) const {
    const KeyWindow& window = source.summed_window;
    const bool seen_before = std::max<std::int64_t>(m - window.last_offset, 0) < run.begin;
    const bool seen_after = std::min(m - window.first_offset, num_blocks - 1) >= run.end;
    if (!seen_before && !seen_after) {
      write_gradients(source, sums.of(m), run.batch, run.head, m);
      return;
    }
    const std::int64_t border = seen_before ? run.begin : run.end;
    std::copy_n(sums.of(m), sums.block_size(),
                border_sums(source, seen_before, run.batch, run.head,
                            (seen_before ? run.index : run.index + 1) - 1,
                            m - border - window.first_offset));
  }

  // The sums of d_k and d_v of the block with index `place` among the blocks that two runs see.
  Sum<T>* border_sums(const KeySource<T>& source, bool of_later_run, std::int64_t b, std::int64_t h,
                      std::int64_t border, std::int64_t place) const {
    const at::Tensor& sums = source.border_sums;
    return sums.mutable_data_ptr<Sum<T>>() + (of_later_run ? sums.stride(0) : 0) +
           b * sums.stride(1) + h * sums.stride(2) + border * sums.stride(3) +
           place * sums.stride(4);
  }

  void write_gradients(const KeySource<T>& source, const Sum<T>* sums, std::int64_t b,
                       std::int64_t h, std::int64_t m) const {
    const int rows = static_cast<int>(block), D = static_cast<int>(head_dim);
    kernels.write_rows(sums, rows, D, source.d_k.rows(b, h, m, 0));
    kernels.write_rows(sums + block * head_dim, rows, D, source.d_v.rows(b, h, m, 0));
  }

  void add_borders(const KeySource<T>& source, std::int64_t run_length) const {
    const std::int64_t borders = source.border_sums.size(3), places = source.reach() - 1;
    at::parallel_for(0, batch * key_heads * borders * places, 4,
                     [&](std::int64_t begin, std::int64_t end) {
                       for (std::int64_t task = begin; task < end; ++task) {
                         const std::int64_t place = task % places, border = task / places % borders,
                                            h = task / places / borders % key_heads,
                                            b = task / places / borders / key_heads;
                         const std::int64_t m =
                             (border + 1) * run_length + source.summed_window.first_offset + place;
                         if (m < 0 || m >= num_blocks) continue;
                         Sum<T>* sums = border_sums(source, false, b, h, border, place);
                         const Sum<T>* later = border_sums(source, true, b, h, border, place);
                         for (std::int64_t i = 0; i < source.border_sums.stride(4); ++i)
                           sums[i] += later[i];
                         write_gradients(source, sums, b, h, m);
                       }
                     });
  }
};

template <typename T>
Call<T> call_of(const BlockOperands& operands, const at::Tensor& softmax_2BHNb) {
  const at::Tensor& q_BHNbD = operands.q_BHNbD;
  const std::int64_t B = q_BHNbD.size(0), H = operands.keys[0].k_BHNbD.size(1), N = q_BHNbD.size(2),
                     block = q_BHNbD.size(3);
  Call<T> call{.batch = B,
               .heads = q_BHNbD.size(1),
               .key_heads = H,
               .num_blocks = N,
               .block = block,
               .head_dim = q_BHNbD.size(4),
               .q = BlockRows<const T>(q_BHNbD),
               .d_out = {},
               .out = {},
               .d_q = {},
               .max_BHNb = softmax_2BHNb[0].mutable_data_ptr<Sum<T>>(),
               .inverse_sum_BHNb = softmax_2BHNb[1].mutable_data_ptr<Sum<T>>(),
               .dropout = tile_dropout(operands.dropout, operands.noise, B, operands.columns.all),
               .sample_ids_B = operands.noise ? operands.noise->sample_ids_B : at::Tensor(),
               .first_head = operands.noise ? operands.noise->first_head : 0,
               .sources = {},
               .tables = DistanceTables<T>(operands.relative),
               .positions = {},
               .sinks = {},
               .d_sinks = {}};
  if (operands.relative.defined()) {
    call.positions.resize(static_cast<std::size_t>(N * block));
    std::iota(call.positions.begin(), call.positions.end(), 0);
  }
  if (operands.sink_H.defined()) {
    const at::Tensor sinks =
        operands.sink_H.detach().to(c10::CppTypeToScalarType<Sum<T>>::value).contiguous();
    call.sinks.assign(sinks.const_data_ptr<Sum<T>>(),
                      sinks.const_data_ptr<Sum<T>>() + sinks.numel());
  }
  const KeyWindow all_blocks{.first_offset = static_cast<int>(1 - N),
                             .last_offset = static_cast<int>(N - 1)};
  std::int64_t column = operands.columns.first;
  for (const KeyBlocks& keys : operands.keys) {
    const at::Tensor& bias = keys.bias_BHNbb;
    call.sources.push_back(
        {.k = BlockRows<const T>(keys.k_BHNbD),
         .v = BlockRows<const T>(keys.v_BHNbD),
         .d_k = {},
         .d_v = {},
         .summed = false,
         .shared = {},
         .in_place = keys.in_place,
         .border_sums = {},
         .chosen = {keys.chosen_BHN, keys.weights_BHN, {}},
         .window = keys.window,
         .summed_window = keys.chosen_BHN.defined() ? all_blocks : keys.window,
         .first_column = column,
         .mask_BHNbb = keys.mask_BHNbb,
         .bias_BHNbb = bias.defined() ? bias.expand({B, H, N, block, block}) : at::Tensor(),
         .d_bias_BHNbb = {}});
    column += num_columns(keys);
  }
  return call;
}

}  // namespace

void attend_in_tiles(const BlockOperands& operands, const BlockResults& results) {
  dispatch_tile_type(operands.q_BHNbD.scalar_type(), [&]<typename T>(T) {
    Call<T> call = call_of<T>(operands, results.softmax_2BHNb);
    call.out = BlockRows<T>(results.out_BHNbD);
    call.run_forward();
  });
}

void gradients_in_tiles(const BlockOperands& operands, const BlockResults& results,
                        const at::Tensor& d_out, BlockGradients& gradients) {
  dispatch_tile_type(d_out.scalar_type(), [&]<typename T>(T) {
    Call<T> call = call_of<T>(operands, results.softmax_2BHNb);
    call.d_out = BlockRows<const T>(d_out);
    call.d_q = BlockRows<T>(gradients.d_q_BHNbD);
    for (std::size_t s = 0; s < call.sources.size(); ++s) {
      KeySource<T>& source = call.sources[s];
      const std::size_t owner = owner_of_gradients(operands.keys, s);
      const KeyGradients& made = gradients.keys[owner];
      source.d_k = BlockRows<T>(made.d_k_BHNbD);
      source.d_v = BlockRows<T>(made.d_v_BHNbD);
      if (owner != s) {
        source.shared = owner;
      } else if (source.chosen.defined() && std::is_same_v<T, Sum<T>>) {
        source.summed_in_place = true;
      } else {
        source.summed = !source.is_owned(call.block) || call.group() > 1;
      }
      if (source.window.first_offset > 0 || source.window.last_offset < 0) {
        made.d_k_BHNbD.zero_();  // no query sees some of the keys
        made.d_v_BHNbD.zero_();
      }
      source.chosen.d_weights_BHN = gradients.keys[s].d_weights_BHN;
      if (gradients.keys[s].d_bias.defined()) {
        source.d_bias_BHNbb = gradients.keys[s].d_bias.expand(source.bias_BHNbb.sizes());
      }
    }
    call.run_backward();
    const TileShape shape = call.shape();
    const auto tables =
        call.tables.gradients(shape.scale, shape.dropout ? shape.dropout->scale : 1);
    gradients.d_relative_keys_HRD = tables.d_keys_HRD;
    gradients.d_relative_values_HRD = tables.d_values_HRD;
    gradients.d_relative_bias_HR = tables.d_bias_HR;
    if (!call.sinks.empty()) {
      gradients.d_sink_H =
          at::from_blob(call.d_sinks.data(),
                        {static_cast<std::int64_t>(call.d_sinks.size()) / call.heads, call.heads},
                        at::kDouble)
              .sum(0)
              .to(operands.sink_H.scalar_type());
    }
  });
}

}  // namespace birkhoff
