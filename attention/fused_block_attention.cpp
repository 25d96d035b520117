// Legend: B batch, H heads, N blocks, b tokens of a block, D head dim, T number type.
#include "attention/fused_block_attention.h"

#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <memory>
#include <new>
#include <optional>
#include <type_traits>
#include <vector>

#include "attention/tile_attention.h"
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

  // Tiles of keys are seen by one tile of queries each.
  bool owned(std::int64_t block) const {
    return first_offset == 0 && last_offset == 0 && block <= kTile;
  }

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

at::ScalarType sum_type(const at::Tensor& x) { return at::toOpMathType(x.scalar_type()); }

// Keys that a query is offered.
std::int64_t num_columns_of(const KeyBlocks& keys) {
  return (keys.last_offset - keys.first_offset + 1) * keys.k_BHNbD.size(3);
}

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

// A new [B, H, N, b, D], unset or sums of 0: contiguous where x is, else in the layers' order,
// [B, N, b, H, D].
at::Tensor new_like(const at::Tensor& x_BHNbD, bool sums) {
  const auto make = [&](at::IntArrayRef sizes) {
    return sums ? at::zeros(sizes, x_BHNbD.options().dtype(sum_type(x_BHNbD)))
                : at::empty(sizes, x_BHNbD.options());
  };
  if (x_BHNbD.is_contiguous()) return make(x_BHNbD.sizes());
  return make({x_BHNbD.size(0), x_BHNbD.size(2), x_BHNbD.size(3), x_BHNbD.size(1), x_BHNbD.size(4)})
      .permute({0, 3, 1, 2, 4});
}

at::Tensor with_dense_rows(const at::Tensor& x) { return x.stride(-1) == 1 ? x : x.contiguous(); }

// [B, H, N, b, b] or undefined, for each offset of each entry.
std::vector<at::Tensor> legal_of(const std::vector<KeyBlocks>& entries) {
  std::vector<at::Tensor> legal;
  for (const KeyBlocks& keys : entries) {
    const at::IntArrayRef sizes = keys.k_BHNbD.sizes();
    for (const at::Tensor& mask : keys.legal_BHNbb) {
      legal.push_back(
          mask.defined() ? mask.expand({sizes[0], sizes[1], sizes[2], sizes[3], sizes[3]}) : mask);
    }
  }
  return legal;
}

// One softmax over some entries of a BlockAttention: all that backward needs again.
struct Operands {
  at::Tensor q_BHNbD;
  std::vector<at::Tensor> keys;  // k and v [B, H, N, b, D], bias of 5 dims or empty; k, ..
  std::vector<at::Tensor> legal_BHNbb;
  std::vector<std::int64_t> windows;  // first offset, last offset, causal, first column; ..
  std::optional<TileDropout> dropout;
  at::Tensor sample_ids_B;

  std::size_t num_sources() const { return keys.size() / 3; }

  template <typename T>
  Call<T> call(const at::Tensor& softmax_2BHNb) const {
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
                 .dropout = dropout,
                 .sample_ids_B = sample_ids_B,
                 .sources = {}};
    auto legal = legal_BHNbb.begin();
    for (std::size_t s = 0; s < num_sources(); ++s) {
      const std::int64_t first = windows[4 * s], last = windows[4 * s + 1];
      const at::Tensor& bias = keys[3 * s + 2];
      call.sources.push_back(
          {.k = BlockRows<const T>(keys[3 * s]),
           .v = BlockRows<const T>(keys[3 * s + 1]),
           .d_k_sum = {},
           .d_v_sum = {},
           .d_k = {},
           .d_v = {},
           .first_offset = first,
           .last_offset = last,
           .causal = windows[4 * s + 2] != 0,
           .first_column = windows[4 * s + 3],
           .legal_BHNbb = {legal, legal + (last - first + 1)},
           .bias_BHNbb = bias.numel() > 0 ? bias.expand({B, H, N, block, block}) : at::Tensor(),
           .d_bias_BHNbb = {}});
      legal += last - first + 1;
    }
    return call;
  }
};

// The gradient of a bias from sums that have a place for each block of each head. One dim after
// another, because LibTorch's sum of all at once would depend on the number of threads.
at::Tensor sum_to_bias(at::Tensor sums, const at::Tensor& bias) {
  for (std::int64_t dim = 0; dim < 3; ++dim) {
    if (bias.size(dim) == 1) sums = sums.sum(dim, /*keepdim=*/true);
  }
  return sums.to(bias.scalar_type());
}

struct FusedBlockAttention : torch::autograd::Function<FusedBlockAttention> {
  // Autograd sees q and keys alone; `operands` holds them too, and what else there is.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& q_BHNbD, at::TensorList,
                            const Operands& operands) {
    const at::Tensor out = new_like(q_BHNbD, /*sums=*/false);
    const at::Tensor softmax_2BHNb =
        at::empty({2, q_BHNbD.size(0), q_BHNbD.size(1), q_BHNbD.size(2), q_BHNbD.size(3)},
                  q_BHNbD.options().dtype(sum_type(q_BHNbD)));
    dispatch(q_BHNbD.scalar_type(), [&]<typename T>(T) {
      Call<T> call = operands.call<T>(softmax_2BHNb);
      call.out = BlockRows<T>(out);
      call.run(Pass::kForward);
    });
    variable_list saved{q_BHNbD, softmax_2BHNb, operands.sample_ids_B};
    saved.insert(saved.end(), operands.keys.begin(), operands.keys.end());
    saved.insert(saved.end(), operands.legal_BHNbb.begin(), operands.legal_BHNbb.end());
    context->save_for_backward(std::move(saved));
    context->saved_data["windows"] = operands.windows;
    if (operands.dropout) {
      const TileDropout& dropout = *operands.dropout;
      context->saved_data["dropout"] = std::vector<std::int64_t>{
          std::bit_cast<std::int64_t>(dropout.key), dropout.least, dropout.query_stride};
      context->saved_data["dropout_scale"] = dropout.scale;
    }
    return out;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    Operands operands;
    operands.q_BHNbD = saved[0];
    operands.sample_ids_B = saved[2];
    operands.windows = context->saved_data["windows"].toIntVector();
    const auto first_key = saved.begin() + 3,
               first_legal =
                   first_key + static_cast<std::ptrdiff_t>(operands.windows.size() / 4 * 3);
    operands.keys = {first_key, first_legal};
    operands.legal_BHNbb = {first_legal, saved.end()};
    if (context->saved_data.count("dropout") > 0) {
      const std::vector<std::int64_t> values = context->saved_data["dropout"].toIntVector();
      operands.dropout = {.key = std::bit_cast<std::uint64_t>(values[0]),
                          .least = static_cast<std::uint32_t>(values[1]),
                          .scale = context->saved_data["dropout_scale"].toDouble(),
                          .query_stride = values[2]};
    }
    const at::Tensor d_out = with_dense_rows(gradients[0]);
    variable_list result{new_like(operands.q_BHNbD, /*sums=*/false)};
    dispatch(d_out.scalar_type(), [&]<typename T>(T) {
      Call<T> call = operands.call<T>(saved[1]);
      call.d_out = BlockRows<const T>(d_out);
      call.d_q = BlockRows<T>(result[0]);
      for (KeySource<T>& source : call.sources) {
        const bool sums = !source.owned(call.block);
        const auto add_result = [&](BlockRows<Sum<T>>& sum, BlockRows<T>& rows) {
          result.push_back(new_like(operands.keys[result.size() - 1], sums));
          if (sums) {
            sum = BlockRows<Sum<T>>(result.back());
          } else {
            rows = BlockRows<T>(result.back());
          }
        };
        add_result(source.d_k_sum, source.d_k);
        add_result(source.d_v_sum, source.d_v);
        const at::Tensor& bias = operands.keys[result.size() - 1];
        result.emplace_back();
        if (bias.numel() == 0 || !context->needs_input_grad(result.size() - 1)) continue;
        result.back() =
            at::zeros({call.batch, call.heads, call.num_blocks, bias.size(3), bias.size(4)},
                      bias.options().dtype(at::kDouble));
        source.d_bias_BHNbb =
            result.back().expand({call.batch, call.heads, call.num_blocks, call.block, call.block});
      }
      call.run(Pass::kBackward);
    });
    for (std::size_t i = 1; i < result.size(); ++i) {
      if (!result[i].defined()) continue;
      const at::Tensor& input = operands.keys[i - 1];
      result[i] = i % 3 == 0 ? sum_to_bias(result[i], input) : result[i].to(input.scalar_type());
    }
    result.emplace_back();  // of `operands`
    return result;
  }
};

// One softmax over `entries` of in.keys, whose first key has column `first_column` of the
// `num_columns` that each query is offered in all.
at::Tensor attend_once(const BlockAttention& in, const std::vector<KeyBlocks>& entries,
                       std::int64_t first_column, std::int64_t num_columns) {
  Operands operands;
  operands.q_BHNbD = with_dense_rows(in.q_BHNbD);
  operands.legal_BHNbb = legal_of(entries);
  for (const KeyBlocks& keys : entries) {
    at::Tensor bias = keys.bias_BHNbb;
    if (!bias.defined()) bias = at::empty({0}, in.q_BHNbD.options());  // autograd wants a tensor
    while (bias.numel() > 0 && bias.dim() < 5) bias = bias.unsqueeze(0);
    operands.keys.insert(operands.keys.end(),
                         {with_dense_rows(keys.k_BHNbD), with_dense_rows(keys.v_BHNbD), bias});
    operands.windows.insert(operands.windows.end(),
                            {keys.first_offset, keys.last_offset, keys.causal, first_column});
    first_column += num_columns_of(keys);
  }
  if (in.noise && in.dropout > 0) {
    const NoiseKey& noise = *in.noise;
    require(in.dropout < 1 && noise.sample_ids_B.size(0) == in.q_BHNbD.size(0),
            "dropout: p must be below 1, and each row needs a sample id");
    const auto step = static_cast<std::uint64_t>(*noise.step.const_data_ptr<std::int64_t>());
    operands.dropout = {
        .key = noise_key(noise.seed, step, noise.layer, NoisePurpose::kAttentionDropout),
        .least = static_cast<std::uint32_t>(in.dropout * 0x1p24f),
        .scale = 1 / (1 - in.dropout),
        .query_stride = num_columns};
    operands.sample_ids_B = noise.sample_ids_B;
  }
  return FusedBlockAttention::apply(operands.q_BHNbD, at::TensorList(operands.keys), operands);
}

}  // namespace

bool fits_fused(const BlockAttention& in) {
  if (!in.q_BHNbD.device().is_cpu() || in.q_BHNbD.size(4) > kMostHeadDim) return false;
  const at::ScalarType dtype = in.q_BHNbD.scalar_type();
  if (dtype != at::kFloat && dtype != at::kDouble && dtype != at::kBFloat16) return false;
  return std::all_of(in.keys.begin(), in.keys.end(), [&](const KeyBlocks& keys) {
    return keys.k_BHNbD.scalar_type() == dtype && keys.v_BHNbD.scalar_type() == dtype &&
           (!keys.bias_BHNbb.defined() || keys.bias_BHNbb.scalar_type() == dtype);
  });
}

at::Tensor attend_fused(const BlockAttention& in) {
  std::int64_t num_columns = 0;
  for (const KeyBlocks& keys : in.keys) num_columns += num_columns_of(keys);
  if (in.one_softmax) return attend_once(in, in.keys, 0, num_columns);
  at::Tensor out_BHNbD;
  std::int64_t first_column = 0;
  for (const KeyBlocks& keys : in.keys) {
    const at::Tensor part = attend_once(in, {keys}, first_column, num_columns);
    out_BHNbD = out_BHNbD.defined() ? out_BHNbD.add(part) : part;
    first_column += num_columns_of(keys);
  }
  return out_BHNbD;
}

}  // namespace birkhoff
