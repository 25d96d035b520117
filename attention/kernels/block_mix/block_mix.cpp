// Legend: B batch, H heads, N blocks, b tokens of a block, D head dim, P problems (B H), F = b D, T
// number type.
#include "attention/kernels/block_mix/block_mix.h"

#include <ATen/Parallel.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <type_traits>

#include "attention/kernels/block_mix/cpu_mix.h"
#include "attention/kernels/block_mix/gpu_body.h"
#include "attention/kernels/block_mix/gpu_mix.h"
#include "attention/kernels/block_mix/mix_autograd.h"
#include "attention/kernels/common/cpu_dtype.h"
#include "attention/kernels/common/cpu_scratch.h"
#include "attention/kernels/common/cpu_sets.h"
#include "attention/kernels/common/fitting_rows.h"
#include "attention/kernels/token_blocks/token_blocks.h"
#include "cluster/base/error.h"
#include "cluster/base/gpu/device.h"
#include "cluster/base/instruction_set.h"
#include "cluster/base/tensors/second_gradient.h"

namespace birkhoff {

template <typename T>
const MixKernels<T>& mix_kernels(InstructionSet set) {
  return for_set(set, []<InstructionSet kSet>() -> const MixKernels<T>& {
    return compiled_mix_kernels<kSetOf<kSet, std::is_same_v<T, Bf16>>, T>();
  });
}

template const MixKernels<float>& mix_kernels(InstructionSet);
template const MixKernels<double>& mix_kernels(InstructionSet);
template const MixKernels<Bf16>& mix_kernels(InstructionSet);

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Head h of sample b of each tensor, without data for an undefined tensor.
template <typename T>
std::vector<HeadBlocks<T>> heads_of(const variable_list& x_BHNbD, std::int64_t b, std::int64_t h) {
  std::vector<HeadBlocks<T>> heads;
  for (const at::Tensor& x : x_BHNbD) {
    if (!x.defined()) {
      heads.emplace_back();
      continue;
    }
    const std::int64_t place = b * x.stride(0) + h * x.stride(1);
    if constexpr (std::is_const_v<T>) {
      heads.push_back({static_cast<T*>(x.const_data_ptr()) + place, x.stride(2), x.stride(3)});
    } else {
      heads.push_back({static_cast<T*>(x.mutable_data_ptr()) + place, x.stride(2), x.stride(3)});
    }
  }
  return heads;
}

// The CPU kernel. A thread takes one head at a time, so no sum depends on the number of threads.
template <typename T>
struct Kernel {
  const MixKernels<T>& kernels = mix_kernels<T>(instruction_set());
  at::Tensor weights_BHNN;  // any strides
  MixShape shape;

  Kernel(const at::Tensor& weights, const at::Tensor& x_BHNbD, std::int64_t diagonal)
      : weights_BHNN(weights),
        shape{static_cast<int>(x_BHNbD.size(2)), static_cast<int>(x_BHNbD.size(3)),
              static_cast<int>(x_BHNbD.size(4)), static_cast<int>(diagonal)} {}

  // Calls work(b, h, weights, scratch) for each head of each sample, on all threads.
  template <typename Work>
  void for_each_head(const Work& work) const {
    const at::Tensor& w = weights_BHNN;
    at::parallel_for(0, w.size(0) * w.size(1), 1, [&](std::int64_t begin, std::int64_t end) {
      const ScratchMemory scratch = scratch_memory(kernels.scratch_bytes(shape));
      for (std::int64_t bh = begin; bh < end; ++bh) {
        const std::int64_t b = bh / w.size(1), h = bh % w.size(1);
        const T* data = static_cast<const T*>(w.const_data_ptr());
        work(b, h,
             MixWeights<T>{data + b * w.stride(0) + h * w.stride(1), w.stride(2), w.stride(3)},
             scratch.get());
      }
    });
  }

  void forward(const variable_list& x_BHNbD, const variable_list& y_BHNbD) const {
    for_each_head([&](std::int64_t b, std::int64_t h, const MixWeights<T>& weights, void* scratch) {
      const auto x = heads_of<const T>(x_BHNbD, b, h);
      const auto y = heads_of<T>(y_BHNbD, b, h);
      kernels.forward(shape, weights, x.data(), y.data(), static_cast<int>(x.size()), scratch);
    });
  }

  // d_w_BHNN is contiguous. `others` are added to d_x; an undefined one adds nothing.
  void backward(const variable_list& x_BHNbD, const variable_list& d_y_BHNbD,
                const variable_list& others_BHNbD, const variable_list& d_x_BHNbD,
                const at::Tensor& d_w_BHNN) const {
    for_each_head([&](std::int64_t b, std::int64_t h, const MixWeights<T>& weights, void* scratch) {
      const auto x = heads_of<const T>(x_BHNbD, b, h), d_y = heads_of<const T>(d_y_BHNbD, b, h);
      const auto others = heads_of<const T>(others_BHNbD, b, h);
      const auto d_x = heads_of<T>(d_x_BHNbD, b, h);
      T* d_w = static_cast<T*>(d_w_BHNN.mutable_data_ptr()) + b * d_w_BHNN.stride(0) +
               h * d_w_BHNN.stride(1);
      kernels.backward(shape, weights, x.data(), d_y.data(), others.data(), d_x.data(),
                       static_cast<int>(x.size()), d_w, scratch);
    });
  }
};

// GEMMs of a quarter of the rows each (at least 16), over the columns that any of these rows may
// use. Weights [P, N, N], tensors [P, N, F].
struct Panels {
  std::int64_t num_blocks, diagonal;

  // Calls work(first row, number of rows, sources of the last row).
  template <typename Work>
  void for_each(const Work& work) const {
    const std::int64_t height =
        diagonal >= num_blocks - 1 ? num_blocks : std::max<std::int64_t>(16, (num_blocks + 3) / 4);
    for (std::int64_t u = 0; u < num_blocks; u += height) {
      const std::int64_t rows = std::min(height, num_blocks - u);
      work(u, rows, std::clamp<std::int64_t>(u + rows + diagonal, 0, num_blocks));
    }
  }

  at::Tensor forward(const at::Tensor& w_PNN, const at::Tensor& x_PNF) const {
    at::Tensor y_PNF = at::empty_like(x_PNF, at::MemoryFormat::Contiguous);
    for_each([&](std::int64_t u, std::int64_t rows, std::int64_t sources) {
      at::Tensor y = y_PNF.narrow(1, u, rows);
      at::bmm_out(y, w_PNN.narrow(1, u, rows).narrow(2, 0, sources), x_PNF.narrow(1, 0, sources));
    });
    return y_PNF;
  }

  // `other` is added to d_x; it may be undefined.
  at::Tensor d_x(const at::Tensor& w_PNN, const at::Tensor& d_y_PNF,
                 const at::Tensor& other_PNF) const {
    at::Tensor d_x_PNF = other_PNF.defined()
                             ? other_PNF.clone(at::MemoryFormat::Contiguous)
                             : at::zeros_like(d_y_PNF, at::MemoryFormat::Contiguous);
    for_each([&](std::int64_t u, std::int64_t rows, std::int64_t sources) {
      d_x_PNF.narrow(1, 0, sources)
          .baddbmm_(w_PNN.narrow(1, u, rows).narrow(2, 0, sources).transpose(1, 2),
                    d_y_PNF.narrow(1, u, rows));
    });
    return d_x_PNF;
  }

  void add_d_w(const at::Tensor& x_PNF, const at::Tensor& d_y_PNF,
               const at::Tensor& d_w_PNN) const {
    for_each([&](std::int64_t u, std::int64_t rows, std::int64_t sources) {
      d_w_PNN.narrow(1, u, rows)
          .narrow(2, 0, sources)
          .baddbmm_(d_y_PNF.narrow(1, u, rows), x_PNF.narrow(1, 0, sources).transpose(1, 2));
    });
  }
};

struct MixLowerBlocks : torch::autograd::Function<MixLowerBlocks> {
  static bool has_kernel(const at::Tensor& x) {
    return x.is_cpu() && has_tile_type(x.scalar_type());
  }
  static at::Tensor flat(const at::Tensor& x_BHNbD) {
    return x_BHNbD.defined() ? x_BHNbD.flatten(0, 1).flatten(2) : x_BHNbD;
  }

  // Returns each y, then each x for its other consumers.
  static variable_list forward(AutogradContext* context, const at::Tensor& weights_BHNN,
                               at::TensorList x_BHNbD, std::int64_t diagonal) {
    variable_list x = each_of(x_BHNbD, with_contiguous_rows), y;
    if (has_kernel(x[0])) {
      y = each_of(x, new_blocks_like);
      dispatch_tile_type(x[0].scalar_type(), [&]<typename T>(T) {
        Kernel<T>(weights_BHNN, x[0], diagonal).forward(x, y);
      });
    } else {
      const Panels panels{weights_BHNN.size(3), diagonal};
      for (const at::Tensor& each : x) {
        y.push_back(panels.forward(weights_BHNN.flatten(0, 1), flat(each)).view(each.sizes()));
      }
    }
    context->saved_data["diagonal"] = diagonal;
    x.push_back(weights_BHNN);
    return mix_outputs(context, std::move(x), std::move(y), x_BHNbD);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_gradient();
    variable_list x = context->get_saved_variables();
    const at::Tensor weights_BHNN = x.back();
    x.pop_back();
    const std::int64_t diagonal = context->saved_data["diagonal"].toInt();
    at::Tensor d_w_BHNN = at::zeros(weights_BHNN.sizes(), weights_BHNN.options());
    const MixGradients mix(gradients, x, with_contiguous_rows);
    const auto& [d_y, others] = mix;
    variable_list d_x;
    if (has_kernel(x[0])) {
      d_x = each_of(x, new_blocks_like);
      dispatch_tile_type(x[0].scalar_type(), [&]<typename T>(T) {
        Kernel<T>(weights_BHNN, x[0], diagonal).backward(x, d_y, others, d_x, d_w_BHNN);
      });
    } else {
      const Panels panels{weights_BHNN.size(3), diagonal};
      const at::Tensor w_PNN = weights_BHNN.flatten(0, 1), d_w_PNN = d_w_BHNN.flatten(0, 1);
      for (std::size_t i = 0; i < x.size(); ++i) {
        const at::Tensor d_y_PNF = flat(d_y[i]);
        d_x.push_back(panels.d_x(w_PNN, d_y_PNF, flat(others[i])).view(x[i].sizes()));
        panels.add_d_w(flat(x[i]), d_y_PNF, d_w_PNN);
      }
      d_w_BHNN.tril_(diagonal);
    }
    return mix_gradients({d_w_BHNN}, d_x);
  }
};

}  // namespace

at::Tensor mix_blocks(const at::Tensor& weights_BHUN, const at::Tensor& x_BHNbD) {
  return at::matmul(weights_BHUN.to(x_BHNbD.scalar_type()), x_BHNbD.flatten(3))
      .unflatten(3, {x_BHNbD.size(3), x_BHNbD.size(4)});
}

bool few_sources_would_save(const std::vector<at::Tensor>& x_BHNbD) {
  const at::Tensor& x = x_BHNbD.at(0);
  return kernel_device(x) == KernelDevice::kGpu &&
         (x.size(2) > BlockMixShape::kFewBlocks || !why_not_gpu_kernels(x_BHNbD).empty());
}

bool leaves_padding_out(const std::vector<at::Tensor>& x_BHNbD, Path limit) {
  return limit == Path::kFused && kernel_device(x_BHNbD.at(0)) == KernelDevice::kGpu &&
         why_not_gpu_kernels(x_BHNbD).empty();
}

BlockMixes mix_lower_blocks(const at::Tensor& weights_BHNN, const std::vector<at::Tensor>& x_BHNbD,
                            std::int64_t diagonal, Path limit, const at::Tensor& rounded,
                            const MixPadding& padding) {
  require(!padding.lengths_B.defined() || leaves_padding_out(x_BHNbD, limit),
          "mix_lower_blocks: no kernel leaves padding out");
  if (limit != Path::kFused) {
    BlockMixes mixes{.y_BHNbD = {}, .x_BHNbD = x_BHNbD};
    for (const at::Tensor& x : x_BHNbD) mixes.y_BHNbD.push_back(mix_blocks(weights_BHNN, x));
    return mixes;
  }
  const at::Tensor& first = x_BHNbD.at(0);
  const std::int64_t N = first.size(2);
  require(weights_BHNN.size(2) == N && weights_BHNN.size(3) == N,
          "mix_lower_blocks: weights must be square");
  diagonal = std::clamp(diagonal, -N, N - 1);
  const Path path = take_path(
      "block mixing",
      fused_unless(why_not_fused(
          first,
          [&] {
            return why_not_dtype(first.scalar_type(), {at::kFloat, at::kDouble, at::kBFloat16});
          },
          [&] { return why_not_gpu_kernels(x_BHNbD); })));
  if (path == Path::kFused && kernel_device(first) == KernelDevice::kGpu) {
    return mix_on_gpu(weights_BHNN, x_BHNbD, diagonal, rounded, padding);
  }
  const at::Tensor weights =
      weights_BHNN.to(first.scalar_type()).expand({first.size(0), first.size(1), N, N});
  return mixes_of(MixLowerBlocks::apply(weights, at::TensorList(x_BHNbD), diagonal));
}

}  // namespace birkhoff
