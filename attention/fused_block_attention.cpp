// Legend: B batch, H heads, N blocks, b tokens of a block, D head dim, T number type.
#include "attention/fused_block_attention.h"

#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>

#include "attention/tile_attention.h"

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
  std::vector<at::Tensor> legal_BHNbb;  // [B, H, N, b, b], one for each offset; may be undefined

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
  Sum<T>*max_BHNb, *inverse_sum_BHNb;
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

at::ScalarType sum_type(const at::Tensor& x) { return at::toOpMathType(x.scalar_type()); }

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

// What autograd carries from forward to backward besides tensors: 3 integers for each entry of
// BlockAttention::keys.
std::vector<std::int64_t> windows_of(const BlockAttention& in) {
  std::vector<std::int64_t> windows;
  for (const KeyBlocks& keys : in.keys) {
    windows.insert(windows.end(), {keys.first_offset, keys.last_offset, keys.causal});
  }
  return windows;
}

// [B, H, N, b, b] or undefined, for each offset of each entry.
std::vector<at::Tensor> legal_of(const BlockAttention& in) {
  std::vector<at::Tensor> legal;
  for (const KeyBlocks& keys : in.keys) {
    const at::IntArrayRef sizes = keys.k_BHNbD.sizes();
    for (const at::Tensor& mask : keys.legal_BHNbb) {
      legal.push_back(
          mask.defined() ? mask.expand({sizes[0], sizes[1], sizes[2], sizes[3], sizes[3]}) : mask);
    }
  }
  return legal;
}

// The tensors of a call: q, then k and v of each entry, then its masks.
struct Operands {
  at::Tensor q_BHNbD;
  std::vector<at::Tensor> keys_BHNbD;  // k, v, k, v, ..
  std::vector<at::Tensor> legal_BHNbb;
  std::vector<std::int64_t> windows;

  std::size_t num_sources() const { return keys_BHNbD.size() / 2; }

  template <typename T>
  Call<T> call(const at::Tensor& softmax_2BHNb) const {
    Call<T> call{.batch = q_BHNbD.size(0),
                 .heads = q_BHNbD.size(1),
                 .num_blocks = q_BHNbD.size(2),
                 .block = q_BHNbD.size(3),
                 .head_dim = q_BHNbD.size(4),
                 .q = BlockRows<const T>(q_BHNbD),
                 .d_out = {},
                 .out = {},
                 .d_q = {},
                 .max_BHNb = softmax_2BHNb[0].mutable_data_ptr<Sum<T>>(),
                 .inverse_sum_BHNb = softmax_2BHNb[1].mutable_data_ptr<Sum<T>>(),
                 .sources = {}};
    auto legal = legal_BHNbb.begin();
    for (std::size_t s = 0; s < num_sources(); ++s) {
      const std::int64_t first = windows[3 * s], last = windows[3 * s + 1];
      call.sources.push_back({.k = BlockRows<const T>(keys_BHNbD[2 * s]),
                              .v = BlockRows<const T>(keys_BHNbD[2 * s + 1]),
                              .d_k_sum = {},
                              .d_v_sum = {},
                              .d_k = {},
                              .d_v = {},
                              .first_offset = first,
                              .last_offset = last,
                              .causal = windows[3 * s + 2] != 0,
                              .legal_BHNbb = {legal, legal + (last - first + 1)}});
      legal += last - first + 1;
    }
    return call;
  }
};

Operands operands_of(const BlockAttention& in) {
  Operands operands{with_dense_rows(in.q_BHNbD), {}, legal_of(in), windows_of(in)};
  for (const KeyBlocks& keys : in.keys) {
    for (const at::Tensor& x : {keys.k_BHNbD, keys.v_BHNbD}) {
      operands.keys_BHNbD.push_back(with_dense_rows(x));
    }
  }
  return operands;
}

FusedForward forward_pass(const Operands& operands) {
  const at::Tensor& q_BHNbD = operands.q_BHNbD;
  const FusedForward result{
      new_like(q_BHNbD, /*sums=*/false),
      at::empty({2, q_BHNbD.size(0), q_BHNbD.size(1), q_BHNbD.size(2), q_BHNbD.size(3)},
                q_BHNbD.options().dtype(sum_type(q_BHNbD)))};
  dispatch(q_BHNbD.scalar_type(), [&]<typename T>(T) {
    Call<T> call = operands.call<T>(result.softmax_2BHNb);
    call.out = BlockRows<T>(result.out_BHNbD);
    call.run(Pass::kForward);
  });
  return result;
}

variable_list backward_pass(const Operands& operands, const at::Tensor& softmax_2BHNb,
                            const at::Tensor& d_out_BHNbD) {
  const at::Tensor d_out = with_dense_rows(d_out_BHNbD);
  variable_list result{new_like(operands.q_BHNbD, /*sums=*/false)};
  dispatch(d_out.scalar_type(), [&]<typename T>(T) {
    Call<T> call = operands.call<T>(softmax_2BHNb);
    call.d_out = BlockRows<const T>(d_out);
    call.d_q = BlockRows<T>(result[0]);
    for (KeySource<T>& source : call.sources) {
      const bool sums = !source.owned(call.block);
      const auto add_result = [&](BlockRows<Sum<T>>& sum, BlockRows<T>& rows) {
        result.push_back(new_like(operands.keys_BHNbD[result.size() - 1], sums));
        if (sums) {
          sum = BlockRows<Sum<T>>(result.back());
        } else {
          rows = BlockRows<T>(result.back());
        }
      };
      add_result(source.d_k_sum, source.d_k);
      add_result(source.d_v_sum, source.d_v);
    }
    call.run(Pass::kBackward);
  });
  for (at::Tensor& gradient : result) gradient = gradient.to(d_out.scalar_type());
  return result;
}

struct FusedBlockAttention : torch::autograd::Function<FusedBlockAttention> {
  // Autograd sees q and keys alone; `in` holds them too, and what else there is.
  static at::Tensor forward(AutogradContext* context, const at::Tensor&, at::TensorList,
                            const BlockAttention& in) {
    const Operands operands = operands_of(in);
    const FusedForward result = forward_pass(operands);
    variable_list saved{operands.q_BHNbD, result.softmax_2BHNb};
    saved.insert(saved.end(), operands.keys_BHNbD.begin(), operands.keys_BHNbD.end());
    saved.insert(saved.end(), operands.legal_BHNbb.begin(), operands.legal_BHNbb.end());
    context->save_for_backward(std::move(saved));
    context->saved_data["windows"] = operands.windows;
    return result.out_BHNbD;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const std::vector<std::int64_t> windows = context->saved_data["windows"].toIntVector();
    const auto first_key = saved.begin() + 2,
               first_legal = first_key + 2 * static_cast<std::ptrdiff_t>(windows.size() / 3);
    const Operands operands{
        saved[0], {first_key, first_legal}, {first_legal, saved.end()}, windows};
    variable_list result = backward_pass(operands, saved[1], gradients[0]);
    result.emplace_back();  // of `in`
    return result;
  }
};

}  // namespace

bool fits_fused(const BlockAttention& in) {
  if (!in.q_BHNbD.device().is_cpu() || in.q_BHNbD.size(4) > kMostHeadDim) return false;
  if (in.noise && in.dropout > 0) return false;
  const at::ScalarType dtype = in.q_BHNbD.scalar_type();
  if (dtype != at::kFloat && dtype != at::kDouble && dtype != at::kBFloat16) return false;
  return std::all_of(in.keys.begin(), in.keys.end(), [&](const KeyBlocks& keys) {
    return !keys.bias_BHNbb.defined() && keys.k_BHNbD.scalar_type() == dtype &&
           keys.v_BHNbD.scalar_type() == dtype;
  });
}

at::Tensor attend_fused(const BlockAttention& in) {
  std::vector<at::Tensor> keys_BHNbD;
  for (const KeyBlocks& keys : in.keys) {
    keys_BHNbD.insert(keys_BHNbD.end(), {keys.k_BHNbD, keys.v_BHNbD});
  }
  return FusedBlockAttention::apply(in.q_BHNbD, at::TensorList(keys_BHNbD), in);
}

FusedForward fused_forward(const BlockAttention& in) { return forward_pass(operands_of(in)); }

std::vector<at::Tensor> fused_backward(const BlockAttention& in, const at::Tensor& softmax_2BHNb,
                                       const at::Tensor& d_out_BHNbD) {
  return backward_pass(operands_of(in), softmax_2BHNb, d_out_BHNbD);
}

}  // namespace birkhoff
