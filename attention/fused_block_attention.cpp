// Legend: B batch, H heads, N blocks, b tokens of a block, D head dim, T number type.
#include "attention/fused_block_attention.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention/block_attention.h"
#include "attention/scratch_memory.h"
#include "attention/tile_attention.h"
#include "cluster/base/device.h"
#include "cluster/base/error.h"
#include "cluster/base/philox.h"

namespace birkhoff {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr std::int64_t kMostHeadDim = 256;

// The numbers of a [B, H, N, b, D] tensor of T, which may be const. Null for an undefined one.
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
  BlockRows<Sum<T>> d_k_sum, d_v_sum;  // instead of the next, where several tiles of queries add
  BlockRows<T> d_k, d_v;
  std::int64_t first_offset, last_offset;
  bool causal;
  std::int64_t first_column;            // of its keys among all that a query is offered
  std::vector<at::Tensor> legal_BHNbb;  // [B, H, N, b, b], one for each offset; may be undefined
  at::Tensor bias_BHNbb;                // [B, H, N, b, b], or undefined
  at::Tensor d_bias_BHNbb;              // its sums in fp64; undefined: not wanted

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
        tile.d_k_sum = d_k_sum.rows(batch, head, source, j);
        tile.d_v_sum = d_v_sum.rows(batch, head, source, j);
        tile.d_k = d_k.rows(batch, head, source, j);
        tile.d_v = d_v.rows(batch, head, source, j);
        tile.causal = own_past && j == first_query;
        tile.first_element = first_column + (offset - first_offset) * block + j;
        const auto place_of = [&](const at::Tensor& x_BHNbb) {
          return batch * x_BHNbb.stride(0) + head * x_BHNbb.stride(1) + n * x_BHNbb.stride(2) +
                 first_query * x_BHNbb.stride(3) + j * x_BHNbb.stride(4);
        };
        if (legal.defined()) {
          tile.legal_query_stride = legal.stride(3);
          tile.legal_key_stride = legal.stride(4);
          tile.legal = legal.const_data_ptr<bool>() + place_of(legal);
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

// All tensors of one call; those of the other pass are undefined.
template <typename T>
struct Call {
  std::int64_t batch, heads, num_blocks, block, head_dim;
  BlockRows<const T> q, d_out;
  BlockRows<T> out, d_q;
  Sum<T>*max_BHNb, *inverse_sum_BHNb;
  std::optional<TileDropout> dropout;
  at::Tensor sample_ids_B;  // where there is dropout
  std::vector<KeySource<T>> sources;

  void attend(Pass pass, std::int64_t b, std::int64_t h, std::int64_t n,
              const TileKernels<T>& kernels, std::vector<KeyTile<T>>& tiles, void* scratch) const {
    const TileShape shape{static_cast<int>(head_dim), 1 / std::sqrt(static_cast<double>(head_dim)),
                          dropout ? &*dropout : nullptr};
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
      if (dropout) {
        queries.sample_id =
            static_cast<std::uint64_t>(sample_ids_B.const_data_ptr<std::int64_t>()[b]);
        // Rows of noise are [H, N, b, columns].
        for (KeyTile<T>& tile : tiles) {
          tile.first_element += (row - b * heads * num_blocks * block) * dropout->query_stride;
        }
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
            const ScratchMemory scratch = scratch_memory(scratch_bytes);
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

// f(T{}) for the kernels' T of a dtype.
template <typename F>
void dispatch(at::ScalarType dtype, F f) {
  switch (dtype) {
    case at::kFloat:
      return f(float{});
    case at::kDouble:
      return f(double{});
    default:
      return f(Bf16{});
  }
}

// x, or a copy of it that the kernels of its device can read.
at::Tensor with_fitting_rows(const at::Tensor& x) {
  if (x.is_cuda()) return with_aligned_rows(x);
  return x.stride(-1) == 1 ? x : x.contiguous();
}

std::optional<TileDropout> dropout_of(const BlockOperands& operands) {
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
               .dropout = dropout_of(operands),
               .sample_ids_B = operands.noise ? operands.noise->sample_ids_B : at::Tensor(),
               .sources = {}};
  auto legal = operands.legal_BHNbb.begin();
  std::int64_t column = operands.columns.first;
  for (std::size_t s = 0; s < operands.num_sources(); ++s) {
    const std::int64_t first = operands.windows[3 * s], last = operands.windows[3 * s + 1];
    const at::Tensor& bias = operands.biases[s];
    call.sources.push_back(
        {.k = BlockRows<const T>(operands.keys_BHNbD[2 * s]),
         .v = BlockRows<const T>(operands.keys_BHNbD[2 * s + 1]),
         .d_k_sum = {},
         .d_v_sum = {},
         .d_k = {},
         .d_v = {},
         .first_offset = first,
         .last_offset = last,
         .causal = operands.windows[3 * s + 2] != 0,
         .first_column = column,
         .legal_BHNbb = {legal, legal + (last - first + 1)},
         .bias_BHNbb = bias.defined() ? bias.expand({B, H, N, block, block}) : at::Tensor(),
         .d_bias_BHNbb = {}});
    legal += last - first + 1;
    column += (last - first + 1) * block;
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
  dispatch(operands.q_BHNbD.scalar_type(), [&]<typename T>(T) {
    Call<T> call = call_of<T>(operands, results.softmax_2BHNb);
    call.out = BlockRows<T>(results.out_BHNbD);
    call.run(Pass::kForward);
  });
  return results;
}

BlockGradients gradients_of(const BlockOperands& operands, const BlockResults& results,
                            const at::Tensor& d_out) {
#ifdef BIRKHOFF_CUDA
  if (d_out.is_cuda()) {
    const BlockGradients gradients = new_gradients(operands, /*added_to=*/false);
    const at::Tensor delta_BHNb = at::empty_like(results.softmax_2BHNb[0]);
    launch_block_attention_backward(
        block_attention_params(operands, results, d_out, delta_BHNb, gradients),
        current_stream(d_out));
    return gradients;
  }
#endif
  BlockGradients gradients = new_gradients(operands, /*added_to=*/true);
  dispatch(d_out.scalar_type(), [&]<typename T>(T) {
    Call<T> call = call_of<T>(operands, results.softmax_2BHNb);
    call.d_out = BlockRows<const T>(d_out);
    call.d_q = BlockRows<T>(gradients.d_q_BHNbD);
    for (std::size_t s = 0; s < call.sources.size(); ++s) {
      KeySource<T>& source = call.sources[s];
      const at::Tensor &d_k = gradients.d_keys_BHNbD[2 * s],
                       &d_v = gradients.d_keys_BHNbD[2 * s + 1];
      if (operands.owned(s)) {
        source.d_k = BlockRows<T>(d_k);
        source.d_v = BlockRows<T>(d_v);
      } else {
        source.d_k_sum = BlockRows<Sum<T>>(d_k);
        source.d_v_sum = BlockRows<Sum<T>>(d_v);
      }
      if (gradients.d_biases[s].defined()) {
        source.d_bias_BHNbb = gradients.d_biases[s].expand(source.bias_BHNbb.sizes());
      }
    }
    call.run(Pass::kBackward);
  });
  for (at::Tensor& d_keys : gradients.d_keys_BHNbD) d_keys = d_keys.to(d_out.scalar_type());
  return gradients;
}

// The gradient of a bias from sums that have a place for each block of each head. One dim after
// another, because LibTorch's sum of all at once would depend on the number of threads.
at::Tensor sum_to_bias(at::Tensor sums, const at::Tensor& bias) {
  for (std::int64_t dim = 0; dim < 3; ++dim) {
    if (bias.size(dim) == 1) sums = sums.sum(dim, /*keepdim=*/true);
  }
  return sums.to(bias.scalar_type());
}

// Gradients of q, of all keys, and of the biases that there are.
variable_list listed(const BlockOperands& operands, const BlockGradients& made) {
  variable_list result{made.d_q_BHNbD};
  result.insert(result.end(), made.d_keys_BHNbD.begin(), made.d_keys_BHNbD.end());
  for (std::size_t s = 0; s < operands.num_sources(); ++s) {
    if (!made.d_biases[s].defined()) continue;
    result.push_back(sum_to_bias(made.d_biases[s], operands.biases[s]));
  }
  return result;
}

BlockOperands fitting_operands(const BlockAttention& in, NoiseColumns columns) {
  BlockOperands operands = operands_of(in, columns);
  operands.q_BHNbD = with_fitting_rows(operands.q_BHNbD);
  for (at::Tensor& keys : operands.keys_BHNbD) keys = with_fitting_rows(keys);
  return operands;
}

struct FusedBlockAttention : torch::autograd::Function<FusedBlockAttention> {
  // Autograd sees q, keys and the biases that there are; `in` holds them too, and what else there
  // is.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& /*q_BHNbD*/,
                            at::TensorList /*keys_BHNbD*/, at::TensorList /*biases*/,
                            const BlockAttention& in, NoiseColumns columns) {
    const BlockOperands operands = fitting_operands(in, columns);
    const BlockResults results = attend(operands);
    save(context, operands, results);
    return results.out_BHNbD;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto [operands, results] = restore(context);
    const at::Tensor d_out = with_fitting_rows(gradients[0]);
    variable_list result = listed(operands, gradients_of(operands, results, d_out));
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

// One softmax over all of in.keys.
at::Tensor attend_entries(BlockAttention in, NoiseColumns columns) {
  std::vector<at::Tensor> keys_BHNbD, biases;
  for (KeyBlocks& keys : in.keys) {
    keys_BHNbD.insert(keys_BHNbD.end(), {keys.k_BHNbD, keys.v_BHNbD});
    if (!keys.bias_BHNbb.defined()) continue;
    while (keys.bias_BHNbb.dim() < 5) keys.bias_BHNbb = keys.bias_BHNbb.unsqueeze(0);
    biases.push_back(keys.bias_BHNbb);
  }
  return FusedBlockAttention::apply(in.q_BHNbD, at::TensorList(keys_BHNbD), at::TensorList(biases),
                                    in, columns);
}

NoiseColumns all_columns(const BlockAttention& in) {
  NoiseColumns columns;
  for (const KeyBlocks& keys : in.keys) columns.all += num_columns(keys);
  return columns;
}

}  // namespace

bool fits_fused(const BlockAttention& in) {
  if (in.q_BHNbD.is_cuda()) return fits_block_attention(in);
  if (!in.q_BHNbD.is_cpu() || in.q_BHNbD.size(4) > kMostHeadDim) return false;
  const at::ScalarType dtype = in.q_BHNbD.scalar_type();
  if (dtype != at::kFloat && dtype != at::kDouble && dtype != at::kBFloat16) return false;
  return std::all_of(in.keys.begin(), in.keys.end(), [&](const KeyBlocks& keys) {
    return keys.k_BHNbD.scalar_type() == dtype && keys.v_BHNbD.scalar_type() == dtype &&
           (!keys.bias_BHNbb.defined() || keys.bias_BHNbb.scalar_type() == dtype);
  });
}

at::Tensor attend_fused(const BlockAttention& in) {
  NoiseColumns columns = all_columns(in);
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

BlockResults fused_forward(const BlockAttention& in) {
  return attend(fitting_operands(in, all_columns(in)));
}

std::vector<at::Tensor> fused_backward(const BlockAttention& in, const BlockResults& results,
                                       const at::Tensor& d_out_BHNbD) {
  const BlockOperands operands = fitting_operands(in, all_columns(in));
  return listed(
      operands,
      gradients_of(operands, {with_fitting_rows(results.out_BHNbD), results.softmax_2BHNb},
                   with_fitting_rows(d_out_BHNbD)));
}

}  // namespace birkhoff
