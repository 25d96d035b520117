// Kernels of a training step that are bound by memory: cross entropy, residual norms, sums of
// squares, AdamW. Sizes as in configs/lmx_base_dense.txtpb with 65,536 tokens, the logits with a
// quarter of them.
#include <cmath>

#include "models/losses/gpu_cross_entropy_params.h"
#include "models/transformer/gpu_residual_norm_params.h"
#include "runtime/gradients/gpu_chunk_sums_params.h"
#include "runtime/optimizers/gpu_fused_update_params.h"
#include "tests/bench/kernel_lab/lab.h"

namespace birkhoff::lab {
namespace {

using Element = __nv_bfloat16;

void fill(const Array<std::int64_t>& targets, std::int64_t vocabulary) {
  std::int64_t* to = targets.get();
  for_each(targets.size(), [=] __device__(std::int64_t i) {
    to[i] = static_cast<std::int64_t>(mixed(i) % vocabulary);
  });
}

// Losses, and gradients in the place of logits.
template <typename T>
void solve_cross_entropy(const Half& logits, const Array<std::int64_t>& targets,
                         std::int64_t vocabulary, const Float& losses, const Array<T>& gradients) {
  const Element* from = logits.get();
  const std::int64_t* target = targets.get();
  float* loss = losses.get();
  T* to = gradients.get();
  for_each(targets.size(), [=] __device__(std::int64_t row) {
    const Element* x = from + row * vocabulary;
    double sum = 0;
    for (std::int64_t v = 0; v < vocabulary; ++v) sum += exp(static_cast<double>(to_float(x[v])));
    const double z = log(sum);
    loss[row] = static_cast<float>(z - to_float(x[target[row]]));
    for (std::int64_t v = 0; v < vocabulary; ++v) {
      const double p = exp(to_float(x[v]) - z) - (v == target[row] ? 1 : 0);
      to[row * vocabulary + v] = from_float<T>(static_cast<float>(p));
    }
  });
}

void cross_entropy(Lab& lab, std::int64_t rows, std::int64_t vocabulary) {
  const std::string shape = std::to_string(rows) + " x " + std::to_string(vocabulary);
  if (!lab.wants("cross entropy", shape)) return;
  const Half logits(rows * vocabulary), given(rows * vocabulary), rounded(rows * vocabulary);
  given.fill_random(1, 2);
  const Array<std::int64_t> targets(rows);
  fill(targets, vocabulary);
  const Array<std::uint8_t> mask(rows);
  cuda_check(cudaMemset(mask.get(), 1, static_cast<std::size_t>(rows)), "cudaMemset");
  const Float losses(rows), exact_losses(rows), exact(rows * vocabulary);
  solve_cross_entropy(given, targets, vocabulary, exact_losses, rounded);
  solve_cross_entropy(given, targets, vocabulary, exact_losses, exact);
  const FusedCrossEntropyParams params{logits.get(),
                                       KernelDtype::kBFloat16,
                                       targets.get(),
                                       mask.get(),
                                       losses.get(),
                                       nullptr,
                                       0,
                                       rows,
                                       vocabulary,
                                       true};
  // The kernel overwrites the logits: the check restores them before each launch, and repeated
  // launches take their own results.
  const auto restore = [=] {
    cuda_check(cudaMemcpy(logits.get(), given.get(), static_cast<std::size_t>(given.bytes()),
                          cudaMemcpyDeviceToDevice),
               "cudaMemcpy");
  };
  Case each{"cross entropy", shape, 2.0 * static_cast<double>(logits.bytes()), 0, logits.bytes()};
  each.launch = [=](int, cudaStream_t stream) { launch_fused_cross_entropy(params, stream); };
  each.outputs = {output("losses", losses, exact_losses, exact_losses),
                  output("gradients", logits, exact, rounded)};
  each.outputs[1].poison = restore;
  each.outputs[0].epsilon = 0x1p-20f;  // a sum of 32,000 terms
  lab.run(each);
}

void residual_norm(Lab& lab, std::int64_t rows, std::int64_t channels) {
  const std::string shape = std::to_string(rows) + " x " + std::to_string(channels);
  if (!lab.wants("residual norm forward", shape) && !lab.wants("residual norm backward", shape)) {
    return;
  }
  const std::int64_t size = rows * channels;
  const Float x = Float(size).fill_random(1), weight = Float(channels).fill_random(3),
              bias = Float(channels).fill_random(4), d_sum = Float(size).fill_random(5);
  const Half y = Half(size).fill_random(2), d_normed = Half(size).fill_random(6);
  const Float sum(size), mean(rows), rstd(rows), d_x(size), d_weight(channels), d_bias(channels),
      partials(ResidualNormBackwardParams::parts(rows, channels) * 2 * channels);
  const Half normed(size), d_y(size);
  const ResidualNormParams forward{KernelDtype::kBFloat16,
                                   rows,
                                   channels,
                                   x.get(),
                                   y.get(),
                                   weight.get(),
                                   bias.get(),
                                   1e-5f,
                                   sum.get(),
                                   normed.get(),
                                   mean.get(),
                                   rstd.get()};
  const ResidualNormBackwardParams backward{
      KernelDtype::kBFloat16, rows,        channels,   d_sum.get(),
      d_normed.get(),         sum.get(),   mean.get(), rstd.get(),
      weight.get(),           d_x.get(),   d_y.get(),  partials.get(),
      d_weight.get(),         d_bias.get()};

  const Float exact(size), exact_d_x(size);
  const Half rounded(size);
  float *to = exact.get(), *to_d_x = exact_d_x.get();
  Element* to_rounded = rounded.get();
  for_each(rows, [=] __device__(std::int64_t row) {
    const std::int64_t first = row * channels;
    const auto* y = static_cast<const Element*>(forward.y);
    const auto* d_normed = static_cast<const Element*>(backward.d_normed);
    const auto value = [&](std::int64_t c) {
      return forward.x[first + c] + to_float(y[first + c]);
    };
    double mean = 0, variance = 0, of_g = 0, of_gh = 0;
    for (std::int64_t c = 0; c < channels; ++c) mean += value(c) / static_cast<double>(channels);
    for (std::int64_t c = 0; c < channels; ++c) {
      variance += (value(c) - mean) * (value(c) - mean) / channels;
    }
    const double r = 1 / sqrt(variance + forward.epsilon);
    for (std::int64_t c = 0; c < channels; ++c) {
      const double h = (value(c) - mean) * r, g = to_float(d_normed[first + c]) * forward.weight[c];
      to[first + c] = static_cast<float>(h * forward.weight[c] + forward.bias[c]);
      to_rounded[first + c] = from_float<Element>(to[first + c]);
      of_g += g / channels;
      of_gh += g * h / channels;
    }
    for (std::int64_t c = 0; c < channels; ++c) {
      const double h = (value(c) - mean) * r, g = to_float(d_normed[first + c]) * forward.weight[c];
      to_d_x[first + c] =
          static_cast<float>(backward.d_sum[first + c] + r * (g - of_g - h * of_gh));
    }
  });
  const double element = static_cast<double>(size);
  Case forwards{"residual norm forward", shape, 12 * element, 0, 12 * size};
  forwards.launch = [=](int, cudaStream_t stream) { launch_residual_norm(forward, stream); };
  forwards.outputs = {output("normed", normed, exact, rounded)};
  if (lab.wants(forwards.kernel, shape)) lab.run(forwards);
  launch_residual_norm(forward, nullptr);
  Case backwards{"residual norm backward", shape, 16 * element, 0, 16 * size};
  backwards.launch = [=](int, cudaStream_t stream) {
    launch_residual_norm_backward(backward, stream);
  };
  backwards.outputs = {output("d_x", d_x, exact_d_x, exact_d_x)};
  backwards.outputs[0].epsilon = 0x1p-20f;
  if (lab.wants(backwards.kernel, shape)) lab.run(backwards);
}

void chunk_sums(Lab& lab, std::int64_t size) {
  const std::string shape = std::to_string(size) + " elements";
  if (!lab.wants("sums of squares", shape)) return;
  const Float x = Float(size).fill_random(1);
  const std::int64_t chunks = (size + ChunkSumsParams::kChunk - 1) / ChunkSumsParams::kChunk;
  const Array<double> sums(chunks);
  // As gradient buckets of 2^20 elements.
  ChunkSumsParams params{KernelDtype::kFloat, 0, {}, sums.get()};
  for (std::int64_t first = 0; first < size; first += 1 << 20) {
    params.tensors[params.num_tensors++] = {x.get() + first, 1 << 20,
                                            (first + (1 << 20)) / ChunkSumsParams::kChunk};
  }
  Case each{"sums of squares", shape, 4.0 * static_cast<double>(size), 0, 4 * size};
  each.launch = [=](int, cudaStream_t stream) { launch_chunk_sums(params, stream); };
  lab.run(each);
}

void adamw(Lab& lab, std::int64_t size) {
  const std::string shape = std::to_string(size) + " elements";
  if (!lab.wants("AdamW", shape)) return;
  const Float values = Float(size).fill_random(1), m = Float(size).fill_random(2),
              gradients = Float(size).fill_random(4);
  const Float v(size);
  cuda_check(cudaMemset(v.get(), 0, static_cast<std::size_t>(v.bytes())), "cudaMemset");
  const Array<std::uint8_t> decayed(size / kDecayGroup);
  decayed.poison();
  const Array<double> scalars(4);
  const double given[] = {1e-6, 1, 1, 10};
  cuda_check(cudaMemcpy(scalars.get(), given, sizeof given, cudaMemcpyHostToDevice), "cudaMemcpy");
  const double* first = scalars.get();
  const FusedUpdateParams<AdamWRule> params{.rule = {0.9, 0.95, 1e-8, 0.1},
                                            .elements = size,
                                            .values = values.get(),
                                            .states = {m.get(), v.get()},
                                            .gradients = gradients.get(),
                                            .gradient_dtype = KernelDtype::kFloat,
                                            .decayed = decayed.get(),
                                            .learning_rate = first,
                                            .gradient_scale = first + 1,
                                            .apply = first + 2,
                                            .num_updates = first + 3};
  Case each{"AdamW", shape, 28.0 * static_cast<double>(size), 0, 28 * size};
  each.launch = [=](int, cudaStream_t stream) {
    (void)scalars, (void)decayed;
    launch_fused_update(params, stream);
  };
  lab.run(each);
}

}  // namespace

void cases(Lab& lab) {
  cross_entropy(lab, 16384, 32000);
  residual_norm(lab, 65536, 512);
  chunk_sums(lab, 52 << 20);
  adamw(lab, 52 << 20);
}

}  // namespace birkhoff::lab
