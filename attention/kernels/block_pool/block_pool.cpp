// Legend: B batch, L tokens, N blocks, b tokens of a block, C channels; T number type of x, S of
// sums. gpu_pool.cu has the formulas and their gradients; the loops below add in the same order.
#include "attention/kernels/block_pool/block_pool.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <type_traits>

#include "cluster/base/error.h"
#include "cluster/base/gpu/device.h"
#include "cluster/base/tensors/second_gradient.h"

namespace birkhoff {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr std::int64_t kChunk = 128;      // channels of a sequence that a thread scans together
constexpr std::int64_t kGrain = 1 << 15;  // elements of x that are worth a thread

at::ScalarType sum_type(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

// A pooling and the sizes of x, with masks, divisors and links of the whole batch.
struct Problem {
  std::int64_t B, L, N, b, C;
  bool cumulative;
  at::Tensor mask_BNb, divisor_BN, links_BN;

  Problem(const BlockPooling& pooling, at::IntArrayRef x_sizes)
      : B(x_sizes[0]),
        L(x_sizes[1]),
        N((x_sizes[1] + pooling.block - 1) / pooling.block),
        b(pooling.block),
        C(x_sizes[2]),
        cumulative(pooling.cumulative) {
    const auto whole = [](const at::Tensor& x, at::IntArrayRef sizes) {
      return x.defined() ? x.expand(sizes).contiguous() : x;
    };
    mask_BNb = whole(pooling.mask_BNb, {B, N, b});
    divisor_BN = pooling.divisor_BN1.defined() ? whole(pooling.divisor_BN1.squeeze(2), {B, N})
                                               : at::Tensor();
    links_BN = whole(pooling.links_BN, {B, N});
  }

  // The number of tokens in block n.
  std::int64_t tokens_of(std::int64_t n) const { return std::min(b, L - n * b); }
  bool is_added(std::int64_t bn, std::int64_t t) const {
    return !mask_BNb.defined() || mask_BNb.const_data_ptr<bool>()[bn * b + t];
  }
  bool is_linked(std::int64_t bn, std::uint8_t bit) const {
    return !links_BN.defined() || (links_BN.const_data_ptr<std::uint8_t>()[bn] & bit) != 0;
  }
  template <typename S>
  S divisor(std::int64_t bn) const {
    return divisor_BN.defined() ? divisor_BN.const_data_ptr<S>()[bn] : S{1};
  }

  // Calls work(b, n) for each block of each sequence.
  template <typename Work>
  void for_each_block(const Work& work) const {
    const std::int64_t grain = std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(1, b * C));
    at::parallel_for(0, B * N, grain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t bn = begin; bn < end; ++bn) work(bn / N, bn % N);
    });
  }
  // Calls work(b, first channel, number of channels) for each chunk of at most kChunk channels of
  // each sequence.
  template <typename Work>
  void for_each_chunk(const Work& work) const {
    const std::int64_t chunks = (C + kChunk - 1) / kChunk;
    at::parallel_for(0, B * chunks, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t c = i % chunks * kChunk;
        work(i / chunks, c, std::min(kChunk, C - c));
      }
    });
  }
};

template <typename T, typename S>
void pool_on_cpu(const Problem& p, const at::Tensor& x_BLC, S* psi) {
  const auto x_of = [&](std::int64_t b, std::int64_t token) {
    return x_BLC.const_data_ptr<T>() + b * x_BLC.stride(0) + token * x_BLC.stride(1);
  };
  p.for_each_block([&](std::int64_t b, std::int64_t n) {
    const std::int64_t bn = b * p.N + n;
    S* sum = psi + bn * p.C;
    std::fill_n(sum, p.C, S{0});
    for (std::int64_t t = 0; t < p.tokens_of(n); ++t) {
      if (!p.is_added(bn, t)) continue;
      const T* x = x_of(b, n * p.b + t);
      for (std::int64_t c = 0; c < p.C; ++c) sum[c] += static_cast<S>(x[c]);
    }
    const S divisor = p.cumulative ? S{1} : p.divisor<S>(bn);
    for (std::int64_t c = 0; c < p.C; ++c) sum[c] /= divisor;
  });
  if (!p.cumulative) return;
  p.for_each_chunk([&](std::int64_t b, std::int64_t first, std::int64_t count) {
    S so_far[kChunk] = {};
    for (std::int64_t n = 0; n < p.N; ++n) {
      const std::int64_t bn = b * p.N + n;
      const bool opens = p.is_linked(bn, kOpens), keeps = p.is_linked(bn, kKeeps);
      const bool adds_first = p.is_linked(bn, kFirstExists);
      const S divisor = p.divisor<S>(bn);
      const T* x = x_of(b, n * p.b) + first;
      S* feature = psi + bn * p.C + first;
      for (std::int64_t c = 0; c < count; ++c) {
        const S sum = feature[c];
        feature[c] =
            ((opens ? so_far[c] : S{0}) + (adds_first ? static_cast<S>(x[c]) : S{0})) / divisor;
        so_far[c] = (keeps ? so_far[c] : S{0}) + sum;
      }
    }
  });
}

// `later` is scratch memory with the shape of d_psi.
template <typename T, typename S>
void pool_backward_on_cpu(const Problem& p, const S* d_psi, S* later, T* d_x) {
  if (p.cumulative) {
    p.for_each_chunk([&](std::int64_t b, std::int64_t first, std::int64_t count) {
      S so_far[kChunk] = {};
      for (std::int64_t n = p.N - 1; n >= 0; --n) {
        const std::int64_t bn = b * p.N + n;
        const bool opens = p.is_linked(bn, kOpens), keeps = p.is_linked(bn, kKeeps);
        const S divisor = p.divisor<S>(bn);
        for (std::int64_t c = 0; c < count; ++c) {
          const std::int64_t place = bn * p.C + first + c;
          later[place] = so_far[c];
          so_far[c] = (keeps ? so_far[c] : S{0}) + (opens ? d_psi[place] / divisor : S{0});
        }
      }
    });
  }
  p.for_each_block([&](std::int64_t b, std::int64_t n) {
    const std::int64_t bn = b * p.N + n;
    const S divisor = p.divisor<S>(bn);
    const bool adds_first = p.cumulative && p.is_linked(bn, kFirstExists);
    const S* d = d_psi + bn * p.C;
    const S* d_sum = p.cumulative ? later + bn * p.C : nullptr;
    for (std::int64_t t = 0; t < p.tokens_of(n); ++t) {
      T* to = d_x + (b * p.L + n * p.b + t) * p.C;
      const bool added = p.is_added(bn, t), first = t == 0 && adds_first;
      for (std::int64_t c = 0; c < p.C; ++c) {
        const S of_first = d[c] / divisor;
        const S of_sum = p.cumulative ? d_sum[c] : of_first;
        to[c] = static_cast<T>((added ? of_sum : S{0}) + (first ? of_first : S{0}));
      }
    }
  });
}

// Calls f with a value of x's type and a value of the type of its sums.
template <typename Function>
void dispatch(at::ScalarType dtype, Function f) {
  if (dtype == at::kDouble) return f(double{}, double{});
  if (dtype == at::kFloat) return f(float{}, float{});
  require(dtype == at::kBFloat16, "pool_blocks: dtype not supported on the CPU");
  f(at::BFloat16{}, float{});
}

BlockPoolParams params_of(const Problem& p, const at::Tensor& x_BLC) {
  BlockPoolParams params{};
  params.dtype = kernel_dtype(x_BLC);
  const auto item = static_cast<std::int64_t>(x_BLC.itemsize());
  params.vectors = fits_vectors(x_BLC, p.C * item) && x_BLC.stride(0) * item % 16 == 0 &&
                   x_BLC.stride(1) * item % 16 == 0;
  params.cumulative = p.cumulative;
  params.batch = p.B;
  params.tokens = p.L;
  params.channels = p.C;
  params.blocks = p.N;
  params.block = p.b;
  if (p.mask_BNb.defined()) params.mask = p.mask_BNb.const_data_ptr<bool>();
  if (p.divisor_BN.defined()) params.divisor = p.divisor_BN.const_data_ptr<float>();
  if (p.links_BN.defined()) params.links = p.links_BN.const_data_ptr<std::uint8_t>();
  return params;
}

at::Tensor pool(const Problem& p, const at::Tensor& x_BLC) {
  const at::Tensor psi_BNC =
      at::empty({p.B, p.N, p.C}, x_BLC.options().dtype(sum_type(x_BLC.scalar_type())));
  if constexpr (kHasGpuKernels) {
    if (x_BLC.is_cuda()) {
      BlockPoolParams params = params_of(p, x_BLC);
      params.x = x_BLC.const_data_ptr();
      std::copy_n(x_BLC.strides().begin(), 2, params.x_strides);
      params.psi = psi_BNC.mutable_data_ptr<float>();
      launch_block_pool(params, current_stream(x_BLC));
      return psi_BNC;
    }
  }
  dispatch(x_BLC.scalar_type(), [&]<typename T, typename S>(T, S) {
    pool_on_cpu<T, S>(p, x_BLC, psi_BNC.mutable_data_ptr<S>());
  });
  return psi_BNC;
}

at::Tensor pool_backward(const Problem& p, const at::Tensor& d_psi_BNC, at::ScalarType dtype) {
  const at::Tensor d_x_BLC = at::empty({p.B, p.L, p.C}, d_psi_BNC.options().dtype(dtype));
  const at::Tensor later_BNC =
      p.cumulative ? at::empty_like(d_psi_BNC) : at::empty({0}, d_psi_BNC.options());
  if constexpr (kHasGpuKernels) {
    if (d_x_BLC.is_cuda()) {
      BlockPoolParams params = params_of(p, d_x_BLC);
      params.d_psi = d_psi_BNC.const_data_ptr<float>();
      params.later = later_BNC.mutable_data_ptr<float>();
      params.d_x = d_x_BLC.mutable_data_ptr();
      launch_block_pool_backward(params, current_stream(d_x_BLC));
      return d_x_BLC;
    }
  }
  dispatch(dtype, [&]<typename T, typename S>(T, S) {
    pool_backward_on_cpu<T, S>(p, d_psi_BNC.const_data_ptr<S>(), later_BNC.mutable_data_ptr<S>(),
                               d_x_BLC.mutable_data_ptr<T>());
  });
  return d_x_BLC;
}

struct PoolBlocks : torch::autograd::Function<PoolBlocks> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x_BLC,
                            const BlockPooling& pooling) {
    context->save_for_backward({pooling.mask_BNb, pooling.divisor_BN1, pooling.links_BN});
    context->saved_data["block"] = pooling.block;
    context->saved_data["cumulative"] = pooling.cumulative;
    context->saved_data["sizes"] = x_BLC.sizes();
    context->saved_data["dtype"] = x_BLC.scalar_type();
    return pool(Problem(pooling, x_BLC.sizes()), x_BLC.stride(2) == 1 ? x_BLC : x_BLC.contiguous());
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_gradient();
    const variable_list saved = context->get_saved_variables();
    const BlockPooling pooling{.block = context->saved_data["block"].toInt(),
                               .mask_BNb = saved[0],
                               .divisor_BN1 = saved[1],
                               .cumulative = context->saved_data["cumulative"].toBool(),
                               .links_BN = saved[2]};
    const Problem problem(pooling, context->saved_data["sizes"].toIntVector());
    return {pool_backward(problem, gradients[0].contiguous(),
                          context->saved_data["dtype"].toScalarType()),
            {}};
  }
};

struct FirstOfBlocks : torch::autograd::Function<FirstOfBlocks> {
  static variable_list forward(AutogradContext* context, const at::Tensor& x_BLC,
                               std::int64_t block) {
    context->set_materialize_grads(false);
    context->saved_data["block"] = block;
    context->saved_data["sizes"] = x_BLC.sizes();
    context->saved_data["dtype"] = x_BLC.scalar_type();
    return {x_BLC, x_BLC.slice(1, 0, x_BLC.size(1), block)
                       .to(sum_type(x_BLC.scalar_type()), /*non_blocking=*/false, /*copy=*/true)};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_gradient();
    const auto& [d_x_BLC, d_first_BNC] = std::tie(gradients[0], gradients[1]);
    if (!d_first_BNC.defined()) return {d_x_BLC, {}};
    const at::ScalarType dtype = context->saved_data["dtype"].toScalarType();
    at::Tensor sum_BLC = d_x_BLC;
    if (!sum_BLC.defined()) {
      sum_BLC =
          at::zeros(context->saved_data["sizes"].toIntVector(), d_first_BNC.options().dtype(dtype));
    } else if (!is_exclusive(d_x_BLC)) {
      sum_BLC = d_x_BLC.clone();
    }
    sum_BLC.slice(1, 0, sum_BLC.size(1), context->saved_data["block"].toInt())
        .add_(d_first_BNC.to(dtype));
    return {sum_BLC, {}};
  }

 private:
  // Whether only the caller's list and `sum_BLC` hold the gradient. A view also holds its base.
  static bool is_exclusive(const at::Tensor& d_x) {
    const bool of_base = d_x.is_view() && d_x._base().use_count() == 1;
    return d_x.use_count() <= 2 && d_x.storage().use_count() <= (of_base ? 2 : 1) &&
           d_x.is_non_overlapping_and_dense();
  }
};

}  // namespace

PathChoice choose_path(const at::Tensor& x_BLC, Path limit) {
  if (limit != Path::kFused) return {};
  const at::ScalarType dtype = x_BLC.scalar_type();
  return fused_unless(why_not_fused(
      x_BLC,
      [&] {
        return why_not_dtype(dtype, {at::kFloat, at::kDouble, at::kBFloat16});
      },
      [&] {
        return why_not_dtype(dtype, {at::kFloat, at::kBFloat16, at::kHalf});
      }));
}

FirstTokens first_of_blocks(const at::Tensor& x_BLC, std::int64_t block) {
  const variable_list both = FirstOfBlocks::apply(x_BLC, block);
  return {both[0], both[1]};
}

at::Tensor pool_blocks(const at::Tensor& x_BLC, const BlockPooling& pooling) {
  require(choose_path(x_BLC, Path::kFused) == Path::kFused,
          "pool_blocks: dtype not supported on this device");
  require(!pooling.divisor_BN1.defined() ||
              pooling.divisor_BN1.scalar_type() == sum_type(x_BLC.scalar_type()),
          "pool_blocks: divisors must be of the result's dtype");
  return PoolBlocks::apply(x_BLC, pooling);
}

}  // namespace birkhoff
