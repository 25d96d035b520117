// Legend: B batch, H heads, N blocks, b tokens of a block, D head dim, T number type.
#include "attention/fused_block_attention.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention/block_attention.h"
#include "attention/block_operands.h"
#include "attention/tile_attention.h"
#include "cluster/base/device.h"

namespace birkhoff {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr std::int64_t kMostHeadDim = 256;

// The numbers of a [B, H, N, b, D] tensor; T may be const. Null for an undefined one.
template <typename T>
struct BlockRows {
  T* data = nullptr;
  std::array<std::int64_t, 4> strides{};  // of B, H, N, b

  BlockRows() = default;
  explicit BlockRows(const at::Tensor& x_BHNbD) {
    if (!x_BHNbD.defined()) return;
    if constexpr (std::is_const_v<T>) {
      data = x_BHNbD.const_data_ptr<std::remove_const_t<T>>();
    } else {
      data = x_BHNbD.mutable_data_ptr<T>();
    }
    for (std::size_t i = 0; i < 4; ++i) strides[i] = x_BHNbD.stride(static_cast<std::int64_t>(i));
  }

  // From row `first` of a block on.
  Rows<T> rows(std::int64_t batch, std::int64_t head, std::int64_t block,
               std::int64_t first) const {
    if (!data) return {};
    return {data + batch * strides[0] + head * strides[1] + block * strides[2] + first * strides[3],
            strides[3]};
  }
};

// One KeyBlocks entry as the kernels see it.
template <typename T>
struct KeySource {
  BlockRows<const T> k, v;
  BlockRows<T> d_k, d_v;
  std::int64_t first_offset, last_offset;
  bool causal;
  std::vector<at::Tensor> legal_BHNbb;  // [B, H, N, b, b], one for each offset; may be undefined

  // Each block of keys belongs to one block of queries.
  bool owned() const { return first_offset == 0 && last_offset == 0; }

  // Adds the tiles that queries [first_query, ..) of block n see.
  void add_tiles(std::int64_t batch, std::int64_t head, std::int64_t n, std::int64_t num_blocks,
                 std::int64_t block, std::int64_t first_query,
                 std::vector<KeyTile<T>>& tiles) const {
    for (std::int64_t offset = first_offset; offset <= last_offset; ++offset) {
      const std::int64_t source = n + offset;
      if (source < 0 || source >= num_blocks) continue;
      const bool own_past = causal && offset == 0;
      const std::int64_t end_key = own_past ? first_query + 1 : block;
      const at::Tensor& legal = legal_BHNbb[static_cast<std::size_t>(offset - first_offset)];
      for (std::int64_t j = 0; j < end_key; j += kTile) {
        KeyTile<T>& tile = tiles.emplace_back();
        tile.num_keys = static_cast<int>(std::min<std::int64_t>(kTile, block - j));
        tile.k = k.rows(batch, head, source, j);
        tile.v = v.rows(batch, head, source, j);
        tile.d_k = d_k.rows(batch, head, source, j);
        tile.d_v = d_v.rows(batch, head, source, j);
        tile.causal = own_past && j == first_query;
        // The first queries to see an owned tile write its gradients.
        tile.accumulate = !owned() || first_query > (own_past ? j : 0);
        if (legal.defined()) {
          tile.legal_query_stride = legal.stride(3);
          tile.legal_key_stride = legal.stride(4);
          tile.legal = legal.const_data_ptr<bool>() + batch * legal.stride(0) +
                       head * legal.stride(1) + n * legal.stride(2) +
                       first_query * tile.legal_query_stride + j * tile.legal_key_stride;
        }
      }
    }
  }
};

struct FreeAligned {
  void operator()(std::byte* memory) const { ::operator delete[](memory, std::align_val_t{64}); }
};

enum class Pass { kForward, kBackward };

// All tensors of one call; those of the other pass are undefined.
template <typename T>
struct Call {
  std::int64_t batch, heads, num_blocks, block, head_dim;
  BlockRows<const T> q, d_out;
  BlockRows<T> out, d_q;
  T *max_BHNb, *inverse_sum_BHNb;
  std::vector<KeySource<T>> sources;

  void attend(Pass pass, std::int64_t b, std::int64_t h, std::int64_t n,
              const TileKernels<T>& kernels, std::vector<KeyTile<T>>& tiles, void* scratch) const {
    const TileShape shape{static_cast<int>(head_dim), 1 / std::sqrt(static_cast<double>(head_dim))};
    for (std::int64_t first = 0; first < block; first += kTile) {
      QueryTile<T> queries;
      queries.num_queries = static_cast<int>(std::min<std::int64_t>(kTile, block - first));
      queries.q = q.rows(b, h, n, first);
      queries.out = out.rows(b, h, n, first);
      const std::int64_t row = ((b * heads + h) * num_blocks + n) * block + first;
      queries.max = max_BHNb + row;
      queries.inverse_sum = inverse_sum_BHNb + row;
      queries.d_out = d_out.rows(b, h, n, first);
      queries.d_q = d_q.rows(b, h, n, first);
      tiles.clear();
      for (const KeySource<T>& source : sources) {
        source.add_tiles(b, h, n, num_blocks, block, first, tiles);
      }
      (pass == Pass::kForward ? kernels.forward : kernels.backward)(
          shape, queries, tiles.data(), static_cast<int>(tiles.size()), scratch);
    }
  }

  // A task is one block of one head. Tasks that add to the same keys' gradients run in different
  // waves, one after the other: no atomics, and sums in an order that no number of threads changes.
  void run(Pass pass) const {
    std::int64_t num_waves = 1, num_key_blocks = 0;
    for (const KeySource<T>& source : sources) {
      const std::int64_t num_offsets = source.last_offset - source.first_offset + 1;
      if (pass == Pass::kBackward) num_waves = std::max(num_waves, num_offsets);
      num_key_blocks += num_offsets;
    }
    // A thread is worth its start for some ten microseconds of work.
    const std::int64_t grain =
        std::max<std::int64_t>(1, 1'000'000 / (4 * block * block * num_key_blocks * head_dim));
    const TileKernels<T>& kernels = tile_kernels<T>();
    const std::size_t scratch_bytes =
        kernels.scratch_bytes(static_cast<int>(head_dim),
                              static_cast<int>(num_key_blocks * ((block + kTile - 1) / kTile)));
    for (std::int64_t wave = 0; wave < num_waves; ++wave) {
      const std::int64_t blocks_of_wave = (num_blocks - wave + num_waves - 1) / num_waves;
      at::parallel_for(
          0, batch * blocks_of_wave * heads, grain, [&](std::int64_t begin, std::int64_t end) {
            const std::unique_ptr<std::byte[], FreeAligned> scratch(new (std::align_val_t{64})
                                                                        std::byte[scratch_bytes]);
            std::vector<KeyTile<T>> tiles;
            for (std::int64_t task = begin; task < end; ++task) {
              // Heads of a token lie side by side in memory.
              const std::int64_t h = task % heads, bn = task / heads;
              attend(pass, bn / blocks_of_wave, h, wave + bn % blocks_of_wave * num_waves, kernels,
                     tiles, scratch.get());
            }
          });
    }
  }
};

// x, or a copy of it that the kernels of its device can read.
at::Tensor with_fitting_rows(const at::Tensor& x) {
  if (x.is_cuda()) return with_aligned_rows(x);
  return x.stride(-1) == 1 ? x : x.contiguous();
}

template <typename T>
Call<T> call_of(const BlockOperands& operands, const at::Tensor& softmax_2BHNb) {
  const at::Tensor& q_BHNbD = operands.q_BHNbD;
  Call<T> call{.batch = q_BHNbD.size(0),
               .heads = q_BHNbD.size(1),
               .num_blocks = q_BHNbD.size(2),
               .block = q_BHNbD.size(3),
               .head_dim = q_BHNbD.size(4),
               .q = BlockRows<const T>(q_BHNbD),
               .d_out = {},
               .out = {},
               .d_q = {},
               .max_BHNb = softmax_2BHNb[0].mutable_data_ptr<T>(),
               .inverse_sum_BHNb = softmax_2BHNb[1].mutable_data_ptr<T>(),
               .sources = {}};
  auto legal = operands.legal_BHNbb.begin();
  for (std::size_t s = 0; s < operands.num_sources(); ++s) {
    const std::int64_t first = operands.windows[3 * s], last = operands.windows[3 * s + 1];
    call.sources.push_back({.k = BlockRows<const T>(operands.keys_BHNbD[2 * s]),
                            .v = BlockRows<const T>(operands.keys_BHNbD[2 * s + 1]),
                            .d_k = {},
                            .d_v = {},
                            .first_offset = first,
                            .last_offset = last,
                            .causal = operands.windows[3 * s + 2] != 0,
                            .legal_BHNbb = {legal, legal + (last - first + 1)}});
    legal += last - first + 1;
  }
  return call;
}

BlockResults attend(const BlockOperands& operands) {
  const BlockResults results = new_results(operands);
#ifdef BIRKHOFF_CUDA
  if (operands.q_BHNbD.is_cuda()) {
    launch_block_attention(block_attention_params(operands, results),
                           current_stream(operands.q_BHNbD));
    return results;
  }
#endif
  AT_DISPATCH_FLOATING_TYPES(operands.q_BHNbD.scalar_type(), "fused_block_attention", [&] {
    Call<scalar_t> call = call_of<scalar_t>(operands, results.softmax_2BHNb);
    call.out = BlockRows<scalar_t>(results.out_BHNbD);
    call.run(Pass::kForward);
  });
  return results;
}

BlockGradients gradients_of(const BlockOperands& operands, const BlockResults& results,
                            const at::Tensor& d_out) {
#ifdef BIRKHOFF_CUDA
  if (d_out.is_cuda()) {
    const BlockGradients gradients = new_gradients(operands, /*zero_shared=*/false);
    const at::Tensor delta_BHNb = at::empty_like(results.softmax_2BHNb[0]);
    launch_block_attention_backward(
        block_attention_params(operands, results, d_out, delta_BHNb, gradients),
        current_stream(d_out));
    return gradients;
  }
#endif
  // Gradients of keys that several blocks of queries see are added to.
  const BlockGradients gradients = new_gradients(operands, /*zero_shared=*/true);
  AT_DISPATCH_FLOATING_TYPES(d_out.scalar_type(), "fused_block_attention_backward", [&] {
    Call<scalar_t> call = call_of<scalar_t>(operands, results.softmax_2BHNb);
    call.d_out = BlockRows<const scalar_t>(d_out);
    call.d_q = BlockRows<scalar_t>(gradients.d_q_BHNbD);
    for (std::size_t s = 0; s < call.sources.size(); ++s) {
      call.sources[s].d_k = BlockRows<scalar_t>(gradients.d_keys_BHNbD[2 * s]);
      call.sources[s].d_v = BlockRows<scalar_t>(gradients.d_keys_BHNbD[2 * s + 1]);
    }
    call.run(Pass::kBackward);
  });
  return gradients;
}

struct FusedBlockAttention : torch::autograd::Function<FusedBlockAttention> {
  // Autograd sees q, keys and the biases that there are; `in` holds them too, and what else there
  // is.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& /*q_BHNbD*/,
                            at::TensorList /*keys_BHNbD*/, at::TensorList /*biases*/,
                            const BlockAttention& in, NoiseColumns columns) {
    BlockOperands operands = operands_of(in, columns);
    operands.q_BHNbD = with_fitting_rows(operands.q_BHNbD);
    for (at::Tensor& keys : operands.keys_BHNbD) keys = with_fitting_rows(keys);
    const BlockResults results = attend(operands);
    save(context, operands, results);
    return results.out_BHNbD;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto [operands, results] = restore(context);
    const at::Tensor d_out = with_fitting_rows(gradients[0]);
    const BlockGradients made = gradients_of(operands, results, d_out);
    variable_list result{made.d_q_BHNbD};
    result.insert(result.end(), made.d_keys_BHNbD.begin(), made.d_keys_BHNbD.end());
    // Autograd sums over what was broadcast.
    for (const at::Tensor& d_bias_BHNb : made.d_biases_BHNb) {
      if (d_bias_BHNb.defined()) result.push_back(d_bias_BHNb.unsqueeze(3));
    }
    result.resize(result.size() + 2);  // of `in` and `columns`
    return result;
  }

 private:
  static void save(AutogradContext* context, const BlockOperands& operands,
                   const BlockResults& results) {
    const NoiseKey noise = operands.noise.value_or(NoiseKey{});
    // The loop on the CPU does without `out`.
    const at::Tensor out = results.out_BHNbD.is_cpu() ? at::Tensor() : results.out_BHNbD;
    variable_list saved{operands.q_BHNbD, out, results.softmax_2BHNb, noise.step,
                        noise.sample_ids_B};
    for (const auto* list : {&operands.keys_BHNbD, &operands.biases, &operands.legal_BHNbb}) {
      saved.insert(saved.end(), list->begin(), list->end());
    }
    context->save_for_backward(std::move(saved));
    context->saved_data["windows"] = operands.windows;
    context->saved_data["dropout"] = static_cast<double>(operands.dropout);
    context->saved_data["noise"] =
        std::vector<std::int64_t>{static_cast<std::int64_t>(noise.seed), noise.layer,
                                  operands.columns.first, operands.columns.all};
  }

  static std::pair<BlockOperands, BlockResults> restore(AutogradContext* context) {
    const variable_list saved = context->get_saved_variables();
    const std::vector<std::int64_t> noise = context->saved_data["noise"].toIntVector();
    BlockOperands operands;
    operands.q_BHNbD = saved[0];
    operands.windows = context->saved_data["windows"].toIntVector();
    const auto num_sources = static_cast<std::ptrdiff_t>(operands.windows.size() / 3);
    const auto keys = saved.begin() + 5, biases = keys + 2 * num_sources,
               legal = biases + num_sources;
    operands.keys_BHNbD = {keys, biases};
    operands.biases = {biases, legal};
    operands.legal_BHNbb = {legal, saved.end()};
    operands.dropout = static_cast<float>(context->saved_data["dropout"].toDouble());
    if (saved[3].defined()) {
      operands.noise = NoiseKey{.seed = static_cast<std::uint64_t>(noise[0]),
                                .step = saved[3],
                                .layer = static_cast<std::uint32_t>(noise[1]),
                                .sample_ids_B = saved[4]};
    }
    operands.columns = {.first = noise[2], .all = noise[3]};
    return {operands, {saved[1], saved[2]}};
  }
};

at::Tensor attend_entries(const BlockAttention& in, NoiseColumns columns) {
  std::vector<at::Tensor> keys_BHNbD, biases;
  for (const KeyBlocks& keys : in.keys) {
    keys_BHNbD.insert(keys_BHNbD.end(), {keys.k_BHNbD, keys.v_BHNbD});
    if (keys.bias_BHNbb.defined()) biases.push_back(keys.bias_BHNbb);
  }
  return FusedBlockAttention::apply(in.q_BHNbD, at::TensorList(keys_BHNbD), at::TensorList(biases),
                                    in, columns);
}

}  // namespace

bool fits_fused(const BlockAttention& in) {
  if (in.q_BHNbD.is_cuda()) return fits_block_attention(in);
  if (!in.q_BHNbD.is_cpu() || in.q_BHNbD.size(4) > kMostHeadDim) return false;
  if (in.noise && in.dropout > 0) return false;
  const at::ScalarType dtype = in.q_BHNbD.scalar_type();
  if (dtype != at::kFloat && dtype != at::kDouble) return false;
  return std::all_of(in.keys.begin(), in.keys.end(), [&](const KeyBlocks& keys) {
    return !keys.bias_BHNbb.defined() && keys.k_BHNbD.scalar_type() == dtype &&
           keys.v_BHNbD.scalar_type() == dtype;
  });
}

at::Tensor attend_fused(const BlockAttention& in) {
  NoiseColumns columns;
  for (const KeyBlocks& keys : in.keys) columns.all += num_columns(keys);
  if (in.one_softmax) return attend_entries(in, columns);
  at::Tensor out_BHNbD;
  for (const KeyBlocks& keys : in.keys) {
    BlockAttention one = in;
    one.keys = {keys};
    const at::Tensor part = attend_entries(one, columns);
    out_BHNbD = out_BHNbD.defined() ? out_BHNbD + part : part;
    columns.first += num_columns(keys);
  }
  return out_BHNbD;
}

}  // namespace birkhoff
