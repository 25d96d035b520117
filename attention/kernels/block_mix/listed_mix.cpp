// Legend: see listed_mix.h; T number type, S the type of its sums.
#include "attention/kernels/block_mix/listed_mix.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <vector>

#include "attention/kernels/block_mix/mix_autograd.h"
#include "attention/kernels/common/cpu_dtype.h"
#include "attention/kernels/common/cpu_vector.h"
#include "attention/kernels/common/fitting_rows.h"
#include "attention/kernels/common/limits.h"
#include "attention/kernels/token_blocks/token_blocks.h"
#include "cluster/base/tensors/second_gradient.h"

namespace birkhoff {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The rows of one block of one head. Rows of neighboring tokens lie far apart in the layers'
// order, which the CPU's own prefetcher does not follow.
template <typename T>
struct BlockRows {
  T* data = nullptr;
  std::int64_t stride = 0, D = 0;

  BlockRows() = default;
  BlockRows(const at::Tensor& x, std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t width)
      : data(static_cast<T*>(const_cast<void*>(x.const_data_ptr())) + b * x.stride(0) +
             h * x.stride(1) + n * x.stride(2)),
        stride(x.stride(3)),
        D(width) {}
  T* at(std::int64_t token) const { return data + token * stride; }
  // Row `token`, which also fetches one that comes soon; rows after the block may not exist, but
  // may be prefetched.
  T* read(std::int64_t token) const {
    constexpr std::int64_t kAhead = 12, kLine = 64 / sizeof(T);
    for (std::int64_t d = 0; d < D; d += kLine) __builtin_prefetch(at(token + kAhead) + d);
    return at(token);
  }
};

template <typename T>
struct ListedMix {
  using S = Sum<T>;

  at::Tensor weights_BHUm, sources_BHUm;  // contiguous
  std::int64_t B, H, N, block, D, U = weights_BHUm.size(2), m = weights_BHUm.size(3);

  // One pair of a destination and a source.
  struct Pair {
    std::int64_t block;  // the index of the other block
    S weight;
  };

  ListedMix(const at::Tensor& weights, const at::Tensor& sources, const at::Tensor& x_BHNbD)
      : weights_BHUm(weights),
        sources_BHUm(sources),
        B(x_BHNbD.size(0)),
        H(x_BHNbD.size(1)),
        N(x_BHNbD.size(2)),
        block(x_BHNbD.size(3)),
        D(x_BHNbD.size(4)) {}

  std::int64_t place(std::int64_t b, std::int64_t h, std::int64_t u) const {
    return ((b * H + h) * U + u) * m;
  }

  // The sources of destination u, without those of weight 0.
  std::vector<Pair> sources_of(std::int64_t b, std::int64_t h, std::int64_t u) const {
    std::vector<Pair> pairs;
    for (std::int64_t i = 0; i < m; ++i) {
      const S weight =
          to_sum(static_cast<const T*>(weights_BHUm.const_data_ptr())[place(b, h, u) + i]);
      if (weight == 0) continue;
      pairs.push_back({sources_BHUm.const_data_ptr<std::int64_t>()[place(b, h, u) + i], weight});
    }
    return pairs;
  }

  // y block n = start block n (where defined) + the sum of the pairs' blocks of x, in their order.
  // The sums, [b, D], stay in the caches while each source is read row by row.
  void add_blocks(const std::vector<Pair>& pairs, const at::Tensor& x, const at::Tensor& start,
                  const at::Tensor& y, std::int64_t b, std::int64_t h, std::int64_t n,
                  std::vector<S>& sums) const {
    if (start.defined()) {
      const BlockRows<const T> from(start, b, h, n, D);
      for (std::int64_t token = 0; token < block; ++token) {
        const T* row = from.read(token);
        S* sum = &sums[static_cast<std::size_t>(token * D)];
        for (std::int64_t d = 0; d < D; ++d) sum[d] = to_sum(row[d]);
      }
    } else {
      std::fill(sums.begin(), sums.end(), S{0});
    }
    for (const Pair& pair : pairs) {
      const BlockRows<const T> from(x, b, h, pair.block, D);
      for (std::int64_t token = 0; token < block; ++token) {
        const T* row = from.read(token);
        S* sum = &sums[static_cast<std::size_t>(token * D)];
        for (std::int64_t d = 0; d < D; ++d) sum[d] += pair.weight * to_sum(row[d]);
      }
    }
    const BlockRows<T> to(y, b, h, n, D);
    for (std::int64_t token = 0; token < block; ++token) {
      const S* sum = &sums[static_cast<std::size_t>(token * D)];
      T* row = to.at(token);
      for (std::int64_t d = 0; d < D; ++d) row[d] = from_sum<T>(sum[d]);
    }
  }

  // Calls work(b, h, n, sums) for n below `count` in each head. The heads of a token are adjacent
  // in memory, so they follow each other.
  template <typename Work>
  void for_each_block(std::int64_t count, const Work& work) const {
    const std::int64_t grain = 100'000 / std::max<std::int64_t>(block * D, 1) + 1;
    at::parallel_for(0, B * H * count, grain, [&](std::int64_t begin, std::int64_t end) {
      std::vector<S> sums(static_cast<std::size_t>(block * D));
      for (std::int64_t i = begin; i < end; ++i) work(i / H / count, i % H, i / H % count, sums);
    });
  }

  void forward(const variable_list& x, const variable_list& y) const {
    for_each_block(U, [&](std::int64_t b, std::int64_t h, std::int64_t u, std::vector<S>& sums) {
      const std::vector<Pair> pairs = sources_of(b, h, u);
      for (std::size_t i = 0; i < x.size(); ++i) add_blocks(pairs, x[i], {}, y[i], b, h, u, sums);
    });
  }

  // The destinations of each source of a head, in ascending order.
  std::vector<std::vector<Pair>> destinations(std::int64_t b, std::int64_t h) const {
    std::vector<std::vector<Pair>> result(static_cast<std::size_t>(N));
    for (std::int64_t u = 0; u < U; ++u) {
      for (const Pair& source : sources_of(b, h, u)) {
        result[static_cast<std::size_t>(source.block)].push_back({u, source.weight});
      }
    }
    return result;
  }

  void backward(const variable_list& x, const variable_list& d_y, const variable_list& others,
                const variable_list& d_x, const at::Tensor& d_w_BHUm) const {
    std::vector<std::vector<std::vector<Pair>>> of_heads(static_cast<std::size_t>(B * H));
    at::parallel_for(0, B * H, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t head = begin; head < end; ++head) {
        of_heads[static_cast<std::size_t>(head)] = destinations(head / H, head % H);
      }
    });
    for_each_block(N, [&](std::int64_t b, std::int64_t h, std::int64_t n, std::vector<S>& sums) {
      const std::vector<Pair>& pairs =
          of_heads[static_cast<std::size_t>(b * H + h)][static_cast<std::size_t>(n)];
      for (std::size_t i = 0; i < x.size(); ++i) {
        add_blocks(pairs, d_y[i], others[i], d_x[i], b, h, n, sums);
      }
    });
    for_each_block(U, [&](std::int64_t b, std::int64_t h, std::int64_t u, std::vector<S>&) {
      add_weight_gradients(x, d_y, b, h, u, d_w_BHUm);
    });
  }

  void add_weight_gradients(const variable_list& x, const variable_list& d_y, std::int64_t b,
                            std::int64_t h, std::int64_t u, const at::Tensor& d_w_BHUm) const {
    for (std::int64_t i = 0; i < m; ++i) {
      const std::int64_t at = place(b, h, u) + i;
      if (to_sum(static_cast<const T*>(weights_BHUm.const_data_ptr())[at]) == 0) continue;
      const std::int64_t source = sources_BHUm.const_data_ptr<std::int64_t>()[at];
      S sum = 0;
      for (std::size_t t = 0; t < x.size(); ++t) {
        const BlockRows<const T> of_x(x[t], b, h, source, D), of_y(d_y[t], b, h, u, D);
        for (std::int64_t token = 0; token < block; ++token) {
          sum += dot_product(of_x.read(token), of_y.read(token), D);
        }
      }
      static_cast<T*>(d_w_BHUm.mutable_data_ptr())[at] = from_sum<T>(sum);
    }
  }
};

struct MixListedBlocks : torch::autograd::Function<MixListedBlocks> {
  // Returns each y, then each x for its other consumers.
  static variable_list forward(AutogradContext* context, const at::Tensor& weights_BHUm,
                               at::TensorList x_BHNbD, const at::Tensor& sources_BHUm) {
    const std::int64_t U = weights_BHUm.size(2);
    variable_list x = each_of(x_BHNbD, with_contiguous_rows),
                  y = each_of(x, [&](const at::Tensor&each) { return new_blocks(each, U); });
    dispatch_tile_type(x[0].scalar_type(), [&]<typename T>(T) {
      ListedMix<T>(weights_BHUm, sources_BHUm, x[0]).forward(x, y);
    });
    x.insert(x.end(), {weights_BHUm, sources_BHUm});
    return mix_outputs(context, std::move(x), std::move(y), x_BHNbD);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_gradient();
    variable_list x = context->get_saved_variables();
    const at::Tensor sources = x.back(), weights = x[x.size() - 2];
    x.resize(x.size() - 2);
    const MixGradients mix(gradients, x, with_contiguous_rows);
    const auto& [d_y, others] = mix;
    const variable_list d_x = each_of(x, new_blocks_like);
    const at::Tensor d_w = at::zeros_like(weights);
    dispatch_tile_type(x[0].scalar_type(), [&]<typename T>(T) {
      ListedMix<T>(weights, sources, x[0]).backward(x, d_y, others, d_x, d_w);
    });
    return mix_gradients({d_w}, d_x);
  }
};

}  // namespace

bool prefers_listed_mix(const at::Tensor& x_BHNbD, std::int64_t num_pairs) {
  constexpr std::int64_t kFewer = 8;  // a matrix product is this much faster than a list's
  return kernel_device(x_BHNbD) == KernelDevice::kCpu && has_tile_type(x_BHNbD.scalar_type()) &&
         x_BHNbD.size(4) <= kMaxTileHeadDim && kFewer * num_pairs <= x_BHNbD.size(2);
}

BlockMixes mix_listed_blocks(const at::Tensor& weights_BHUm, const at::Tensor& sources_BHUm,
                             const std::vector<at::Tensor>& x_BHNbD) {
  const at::Tensor& first = x_BHNbD.at(0);
  std::vector<std::int64_t> sizes = weights_BHUm.sizes().vec();
  sizes[0] = first.size(0);
  sizes[1] = first.size(1);
  return mixes_of(
      MixListedBlocks::apply(weights_BHUm.to(first.scalar_type()).expand(sizes).contiguous(),
                             at::TensorList(x_BHNbD), sources_BHUm.expand(sizes).contiguous()));
}

}  // namespace birkhoff
