// Legend: B batch, H heads, N blocks, b tokens per block, D head dim, T number type.
#include "attention/kernels/block_attention/cpu_tasks.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <type_traits>
#include <vector>

#include "attention/kernels/common/cpu_dtype.h"
#include "attention/kernels/common/cpu_scratch.h"
#include "attention/kernels/tile_attention/cpu_loop.h"
#include "attention/kernels/tile_attention/cpu_nan.h"
#include "cluster/base/error.h"
#include "cluster/base/random/philox.h"

namespace birkhoff {
namespace {

// Pointer and strides of a [B, H, N, b, D] tensor of T, which may be const. Null for an undefined
// tensor.
template <typename T>
struct BlockRows {
  T* data = nullptr;
  std::array<std::int64_t, 4> strides{};  // of B, H, N, b

  BlockRows() = default;
  explicit BlockRows(const at::Tensor& x_BHNbD) {
    if (!x_BHNbD.defined()) return;
    if constexpr (std::is_const_v<T>) {
      data = static_cast<T*>(x_BHNbD.const_data_ptr());
    } else {
      data = static_cast<T*>(x_BHNbD.mutable_data_ptr());
    }
    for (std::size_t i = 0; i < 4; ++i) strides[i] = x_BHNbD.stride(static_cast<std::int64_t>(i));
  }

  // The rows of a block, from row `first` on.
  Rows<T> rows(std::int64_t batch, std::int64_t head, std::int64_t block,
               std::int64_t first) const {
    if (!data) return {};
    return {data + batch * strides[0] + head * strides[1] + block * strides[2] + first * strides[3],
            strides[3]};
  }
};

// Sums, in scratch, of the gradients of one source's keys, for the `reach` blocks that the current
// block of queries sees. A block that comes into reach takes the place of the block that left it.
template <typename T>
struct KeySums {
  Sum<T>* data = nullptr;  // null: only one tile of queries sees each tile of keys
  std::int64_t reach = 0, block = 0, head_dim = 0;

  // The sums of one block of keys: d_k, then d_v, [2, b, D].
  std::int64_t block_size() const { return 2 * block * head_dim; }
  Sum<T>* of(std::int64_t key_block) const { return data + key_block % reach * block_size(); }
  Rows<Sum<T>> d_k(std::int64_t key_block, std::int64_t row) const {
    return {of(key_block) + row * head_dim, head_dim};
  }
  Rows<Sum<T>> d_v(std::int64_t key_block, std::int64_t row) const {
    return d_k(key_block, block + row);
  }
};

// One KeyBlocks entry as the kernels see it.
template <typename T>
struct KeySource {
  BlockRows<const T> k, v;
  BlockRows<T> d_k, d_v;
  bool summed = false;  // several tiles of queries add to the gradients of a tile of keys
  // KeySums of blocks that two runs see: [2, B, H, runs - 1, reach - 1, 2, b, D], the earlier run's
  // first.
  at::Tensor border_sums;
  KeyWindow window;
  std::int64_t first_column;           // of its keys, among the keys of all sources
  std::vector<at::Tensor> mask_BHNbb;  // [B, H, N, b, b], one for each offset; may be undefined
  at::Tensor bias_BHNbb;               // [B, H, N, b, b], or undefined
  at::Tensor d_bias_BHNbb;             // the gradient sums in fp64; undefined: not wanted

  std::int64_t reach() const { return window.num_offsets(); }
  // Whether only one tile of queries sees each tile of keys.
  bool is_owned(std::int64_t block) const { return window.is_own_block() && block <= kTile; }

  // Appends the tiles that queries [first_query, ..) of block n see.
  void add_tiles(std::int64_t batch, std::int64_t head, std::int64_t n, std::int64_t num_blocks,
                 std::int64_t block, std::int64_t first_query, const KeySums<T>& sums,
                 std::vector<KeyTile<T>>& tiles) const {
    for (std::int64_t offset = window.first_offset; offset <= window.last_offset; ++offset) {
      const std::int64_t source = n + offset;
      if (source < 0 || source >= num_blocks) continue;
      const bool own_past = window.causal && offset == 0;
      const std::int64_t end_key = own_past ? first_query + 1 : block;
      const at::Tensor& mask = mask_BHNbb[static_cast<std::size_t>(offset - window.first_offset)];
      for (std::int64_t j = 0; j < end_key; j += kTile) {
        KeyTile<T>& tile = tiles.emplace_back();
        tile.num_keys = static_cast<int>(std::min<std::int64_t>(kTile, block - j));
        tile.k = k.rows(batch, head, source, j);
        tile.v = v.rows(batch, head, source, j);
        if (sums.data) {
          tile.d_k_sum = sums.d_k(source, j);
          tile.d_v_sum = sums.d_v(source, j);
        }
        tile.d_k = d_k.rows(batch, head, source, j);
        tile.d_v = d_v.rows(batch, head, source, j);
        tile.causal = own_past && j == first_query;
        tile.first_element = first_column + (offset - window.first_offset) * block + j;
        const auto place_of = [&](const at::Tensor& x_BHNbb) {
          return batch * x_BHNbb.stride(0) + head * x_BHNbb.stride(1) + n * x_BHNbb.stride(2) +
                 first_query * x_BHNbb.stride(3) + j * x_BHNbb.stride(4);
        };
        if (mask.defined()) {
          tile.mask_query_stride = mask.stride(3);
          tile.mask_key_stride = mask.stride(4);
          tile.mask = mask.const_data_ptr<bool>() + place_of(mask);
        }
        if (bias_BHNbb.defined()) {
          tile.bias_query_stride = bias_BHNbb.stride(3);
          tile.bias_key_stride = bias_BHNbb.stride(4);
          tile.bias = static_cast<const T*>(bias_BHNbb.const_data_ptr()) + place_of(bias_BHNbb);
        }
        if (d_bias_BHNbb.defined()) {
          tile.d_bias_query_stride = d_bias_BHNbb.stride(3);
          tile.d_bias_key_stride = d_bias_BHNbb.stride(4);
          tile.d_bias = d_bias_BHNbb.mutable_data_ptr<double>() + place_of(d_bias_BHNbb);
        }
      }
    }
  }
};

enum class Pass { kForward, kBackward };

// All tensors of one call; tensors that only the other pass needs are undefined.
template <typename T>
struct Call {
  std::int64_t batch, heads, num_blocks, block, head_dim;
  BlockRows<const T> q, d_out;
  BlockRows<T> out, d_q;
  Sum<T>*max_BHNb, *inverse_sum_BHNb;
  std::optional<TileDropout> dropout;
  at::Tensor sample_ids_B;  // defined with dropout
  std::vector<KeySource<T>> sources;
  const TileKernels<T>& kernels = tile_kernels<T>();

  // A thread's memory.
  struct Worker {
    ScratchMemory scratch, sums_memory;
    std::vector<KeySums<T>> sums;  // of each source
    std::vector<KeyTile<T>> tiles;
  };

  // Blocks of queries [begin, end) of one head; `index` is its number among the runs of that head.
  struct Run {
    std::int64_t batch, head, index, begin, end;
  };

  std::int64_t tiles_per_block() const { return (block + kTile - 1) / kTile; }

  Worker worker(Pass pass) const {
    std::int64_t num_tiles = 0, num_sums = 0;
    for (const KeySource<T>& source : sources) {
      num_tiles += source.reach() * tiles_per_block();
      if (source.summed) num_sums += source.reach() * 2 * block * head_dim;
    }
    if (pass == Pass::kForward) num_tiles = 1;  // forward keeps nothing of earlier tiles
    Worker worker{
        .scratch = scratch_memory(
            kernels.scratch_bytes(static_cast<int>(head_dim), static_cast<int>(num_tiles))),
        .sums_memory = scratch_memory(static_cast<std::size_t>(num_sums) * sizeof(Sum<T>)),
        .sums = {},
        .tiles = {}};
    auto* data = reinterpret_cast<Sum<T>*>(worker.sums_memory.get());
    for (const KeySource<T>& source : sources) {
      KeySums<T>& sums = worker.sums.emplace_back();
      if (!source.summed) continue;
      sums = {data, source.reach(), block, head_dim};
      data += sums.reach * sums.block_size();
    }
    return worker;
  }

  // Runs one tile of queries: those of block n from `first` on.
  void attend_tile(Pass pass, std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t first,
                   Worker& worker) const {
    const TileShape shape{static_cast<int>(head_dim), 1 / std::sqrt(static_cast<double>(head_dim)),
                          dropout ? &*dropout : nullptr};
    QueryTile<T> queries;
    queries.num_queries = static_cast<int>(std::min<std::int64_t>(kTile, block - first));
    queries.q = q.rows(b, h, n, first);
    queries.out = out.rows(b, h, n, first);
    const std::int64_t row = ((b * heads + h) * num_blocks + n) * block + first;
    queries.max = max_BHNb + row;
    queries.inverse_sum = inverse_sum_BHNb + row;
    queries.d_out = d_out.rows(b, h, n, first);
    queries.d_q = d_q.rows(b, h, n, first);
    std::vector<KeyTile<T>>& tiles = worker.tiles;
    tiles.clear();
    for (std::size_t s = 0; s < sources.size(); ++s) {
      sources[s].add_tiles(b, h, n, num_blocks, block, first, worker.sums[s], tiles);
    }
    if (dropout) {
      queries.sample_id =
          static_cast<std::uint64_t>(sample_ids_B.const_data_ptr<std::int64_t>()[b]);
      // A sample's noise is [H, N, b, columns].
      for (KeyTile<T>& tile : tiles) {
        tile.first_element += (row - b * heads * num_blocks * block) * dropout->query_stride;
      }
    }
    (pass == Pass::kForward ? &birkhoff::attend_tile<T>
                            : &add_tile_gradients<T>)(kernels, shape, queries, tiles.data(),
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
  // in a causal block the last tiles see the most keys, and each thread gets neighbouring tasks.
  void run_forward() {
    std::int64_t num_key_blocks = 0;
    for (const KeySource<T>& source : sources) num_key_blocks += source.reach();
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
            attend_tile(Pass::kForward, b, h, n, tile * kTile, thread);
          }
        });
  }

  // A task is a run of consecutive blocks of one head. No two tasks write to the same memory: sums
  // of keys that two runs see wait in border_sums. So there are no atomics, and the order of the
  // sums does not depend on the number of threads.
  void run_backward() {
    constexpr std::int64_t kLeastRun = 8;  // longer runs have fewer blocks at borders
    std::int64_t run_length = 1, num_key_blocks = 0;
    for (const KeySource<T>& source : sources) {
      if (source.summed) run_length = std::max({run_length, kLeastRun, source.reach() - 1});
      num_key_blocks += source.reach();
    }
    const std::int64_t num_runs = (num_blocks + run_length - 1) / run_length;
    for (KeySource<T>& source : sources) {
      if (!source.summed) continue;
      source.border_sums =
          at::empty({2, batch, heads, num_runs - 1, source.reach() - 1, 2, block, head_dim},
                    c10::CppTypeToScalarType<Sum<T>>::value);
    }
    const std::int64_t grain = grain_of(4 * run_length * block * block * num_key_blocks * head_dim);
    at::parallel_for(0, batch * num_runs * heads, grain, [&](std::int64_t begin, std::int64_t end) {
      Worker thread = worker(Pass::kBackward);
      for (std::int64_t task = begin; task < end; ++task) {
        const std::int64_t index = task / heads % num_runs;
        attend_run({.batch = task / heads / num_runs,
                    .head = task % heads,
                    .index = index,
                    .begin = index * run_length,
                    .end = std::min((index + 1) * run_length, num_blocks)},
                   thread);
      }
    });
    for (const KeySource<T>& source : sources) {
      if (source.summed) add_borders(source, run_length);
    }
  }

  void attend_run(const Run& run, Worker& worker) const {
    for (std::int64_t n = run.begin; n < run.end; ++n) {
      for (std::size_t s = 0; s < sources.size(); ++s) {
        if (!sources[s].summed) continue;
        const std::int64_t first =
            n == run.begin ? sources[s].window.first_offset : sources[s].window.last_offset;
        for_key_blocks(n + first, n + sources[s].window.last_offset, [&](std::int64_t m) {
          std::fill_n(worker.sums[s].of(m), worker.sums[s].block_size(), Sum<T>{0});
        });
      }
      for (std::int64_t first = 0; first < block; first += kTile) {
        attend_tile(Pass::kBackward, run.batch, run.head, n, first, worker);
      }
      for (std::size_t s = 0; s < sources.size(); ++s) {
        if (!sources[s].summed) continue;
        const std::int64_t last =
            n + 1 == run.end ? sources[s].window.last_offset : sources[s].window.first_offset;
        for_key_blocks(n + sources[s].window.first_offset, n + last,
                       [&](std::int64_t m) { leave(sources[s], worker.sums[s], run, m); });
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
    const bool seen_before = std::max<std::int64_t>(m - source.window.last_offset, 0) < run.begin;
    const bool seen_after = std::min(m - source.window.first_offset, num_blocks - 1) >= run.end;
    if (!seen_before && !seen_after) {
      write_gradients(source, sums.of(m), run.batch, run.head, m);
      return;
    }
    const std::int64_t border = seen_before ? run.begin : run.end;
    std::copy_n(sums.of(m), sums.block_size(),
                border_sums(source, seen_before, run.batch, run.head,
                            (seen_before ? run.index : run.index + 1) - 1,
                            m - border - source.window.first_offset));
  }

  // The sums of d_k and d_v of block `place` among the blocks that two runs see.
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
    at::parallel_for(
        0, batch * heads * borders * places, 4, [&](std::int64_t begin, std::int64_t end) {
          for (std::int64_t task = begin; task < end; ++task) {
            const std::int64_t place = task % places, border = task / places % borders,
                               h = task / places / borders % heads,
                               b = task / places / borders / heads;
            const std::int64_t m = (border + 1) * run_length + source.window.first_offset + place;
            if (m < 0 || m >= num_blocks) continue;
            Sum<T>* sums = border_sums(source, false, b, h, border, place);
            const Sum<T>* later = border_sums(source, true, b, h, border, place);
            for (std::int64_t i = 0; i < source.border_sums.stride(4); ++i) sums[i] += later[i];
            write_gradients(source, sums, b, h, m);
          }
        });
  }
};

std::optional<TileDropout> tile_dropout_of(const BlockOperands& operands) {
  if (!operands.noise) return std::nullopt;
  const NoiseKey& noise = *operands.noise;
  require(operands.dropout < 1 && noise.sample_ids_B.size(0) == operands.q_BHNbD.size(0),
          "dropout: p must be below 1, and each row needs a sample id");
  const auto step = static_cast<std::uint64_t>(*noise.step.const_data_ptr<std::int64_t>());
  return TileDropout{
      .key = noise_key(noise.seed, step, noise.layer, NoisePurpose::kAttentionDropout),
      .least = static_cast<std::uint32_t>(operands.dropout * 0x1p24f),
      .scale = 1 / (1 - operands.dropout),
      .query_stride = operands.columns.all};
}

template <typename T>
Call<T> call_of(const BlockOperands& operands, const at::Tensor& softmax_2BHNb) {
  const at::Tensor& q_BHNbD = operands.q_BHNbD;
  const std::int64_t B = q_BHNbD.size(0), H = q_BHNbD.size(1), N = q_BHNbD.size(2),
                     block = q_BHNbD.size(3);
  Call<T> call{.batch = B,
               .heads = H,
               .num_blocks = N,
               .block = block,
               .head_dim = q_BHNbD.size(4),
               .q = BlockRows<const T>(q_BHNbD),
               .d_out = {},
               .out = {},
               .d_q = {},
               .max_BHNb = softmax_2BHNb[0].mutable_data_ptr<Sum<T>>(),
               .inverse_sum_BHNb = softmax_2BHNb[1].mutable_data_ptr<Sum<T>>(),
               .dropout = tile_dropout_of(operands),
               .sample_ids_B = operands.noise ? operands.noise->sample_ids_B : at::Tensor(),
               .sources = {}};
  std::int64_t column = operands.columns.first;
  for (const KeyBlocks& keys : operands.keys) {
    const at::Tensor& bias = keys.bias_BHNbb;
    call.sources.push_back(
        {.k = BlockRows<const T>(keys.k_BHNbD),
         .v = BlockRows<const T>(keys.v_BHNbD),
         .d_k = {},
         .d_v = {},
         .summed = false,
         .border_sums = {},
         .window = keys.window,
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
                        const at::Tensor& d_out, const BlockGradients& gradients) {
  dispatch_tile_type(d_out.scalar_type(), [&]<typename T>(T) {
    Call<T> call = call_of<T>(operands, results.softmax_2BHNb);
    call.d_out = BlockRows<const T>(d_out);
    call.d_q = BlockRows<T>(gradients.d_q_BHNbD);
    for (std::size_t s = 0; s < call.sources.size(); ++s) {
      KeySource<T>& source = call.sources[s];
      const KeyGradients& made = gradients.keys[s];
      source.d_k = BlockRows<T>(made.d_k_BHNbD);
      source.d_v = BlockRows<T>(made.d_v_BHNbD);
      source.summed = !source.is_owned(call.block);
      if (source.window.first_offset > 0 || source.window.last_offset < 0) {
        made.d_k_BHNbD.zero_();  // no query sees some of the keys
        made.d_v_BHNbD.zero_();
      }
      if (made.d_bias.defined()) {
        source.d_bias_BHNbb = made.d_bias.expand(source.bias_BHNbb.sizes());
      }
    }
    call.run_backward();
  });
}

}  // namespace birkhoff
