// Kernels of a training step that are bound by memory: cross entropy, residual norms, activations,
// pooling of blocks, sums of squares, AdamW. Sizes as in configs/lmx_base_dense.txtpb with 65,536
// tokens, the logits with a quarter of them.
#include <cmath>

#include "attention/kernels/block_pool/gpu_params.h"
#include "models/losses/gpu_cross_entropy_params.h"
#include "models/transformer/activation/gpu_activation_params.h"
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

// y, and d_x.
template <typename T>
void solve_activation(const ActivationParams& p, const Array<T>& y, const Array<T>& d_x) {
  T *to_y = y.get(), *to_d_x = d_x.get();
  const int columns = p.columns();
  for_each(p.rows * p.width, [=] __device__(std::int64_t i) {
    const std::int64_t row = i / p.width, f = i % p.width, at = row * columns + f;
    const auto* x = static_cast<const Element*>(p.x);
    const double a = to_float(x[at]) + p.bias[f], below = 0.5 * erfc(-a * 0.70710678118654752),
                 slope = below + a * 0.3989422804014327 * exp(-0.5 * a * a),
                 d = to_float(static_cast<const Element*>(p.d_y)[i]);
    const bool gated = p.kind == ActivationKind::kGeglu;
    const double gate = gated ? to_float(x[at + p.width]) + p.bias[p.width + f] : 1.0;
    to_y[i] = from_float<T>(static_cast<float>(a * below * gate));
    to_d_x[at] = from_float<T>(static_cast<float>(d * slope * gate));
    if (gated) to_d_x[at + p.width] = from_float<T>(static_cast<float>(d * a * below));
  });
}

void activation(Lab& lab, ActivationKind kind, const char* name, std::int64_t rows, int width) {
  const std::string shape = std::to_string(rows) + " x " + std::to_string(width),
                    forward = std::string(name) + " forward",
                    backward = std::string(name) + " backward";
  if (!lab.wants(forward, shape) && !lab.wants(backward, shape)) return;
  const int columns = ActivationParams::num_halves(kind) * width;
  const std::int64_t size = rows * width, wide = rows * columns;
  const Half x = Half(wide).fill_random(1), d_y = Half(size).fill_random(2), y(size), d_x(wide),
             rounded_y(size), rounded_d_x(wide);
  const Float bias = Float(columns).fill_random(3), exact_y(size), exact_d_x(wide);
  ActivationParams params{.kind = kind,
                          .dtype = KernelDtype::kBFloat16,
                          .rows = rows,
                          .width = width,
                          .x = x.get(),
                          .bias = bias.get(),
                          .y = y.get(),
                          .d_y = d_y.get(),
                          .d_x = d_x.get(),
                          .partials = nullptr};
  const Float partials(params.parts() * columns), exact_partials(partials.size());
  params.partials = partials.get();
  solve_activation(params, exact_y, exact_d_x);
  const float* from = exact_d_x.get();
  float* to = exact_partials.get();
  for_each(partials.size(), [=] __device__(std::int64_t i) {
    const std::int64_t first = i / columns * ActivationParams::kPartRows;
    double sum = 0;
    for (std::int64_t row = first; row < rows && row < first + ActivationParams::kPartRows; ++row) {
      sum += from[row * columns + i % columns];
    }
    to[i] = static_cast<float>(sum);
  });
  solve_activation(params, rounded_y, rounded_d_x);
  Case forwards{forward, shape, 2.0 * static_cast<double>(size + wide), 0, 2 * (size + wide)};
  forwards.launch = [=](int, cudaStream_t stream) {
    (void)bias;
    launch_activation(params, stream);
  };
  forwards.outputs = {output("y", y, exact_y, rounded_y)};
  if (lab.wants(forward, shape)) lab.run(forwards);
  Case backwards{backward, shape, 2.0 * static_cast<double>(size + 2 * wide), 0,
                 2 * (size + 2 * wide)};
  backwards.launch = [=](int, cudaStream_t stream) {
    (void)bias, (void)partials;
    launch_activation_backward(params, stream);
  };
  backwards.outputs = {output("d_x", d_x, exact_d_x, rounded_d_x),
                       output("parts of d_bias", partials, exact_partials, exact_partials)};
  backwards.outputs[1].epsilon = 0x1p-18f;  // sums of 256 rows
  if (lab.wants(backward, shape)) lab.run(backwards);
}

// Means of all tokens up to each block's first.
void block_pool(Lab& lab, std::int64_t batch, std::int64_t tokens, std::int64_t channels) {
  constexpr std::int64_t kBlock = 64;
  const std::string shape = std::to_string(batch * tokens) + " x " + std::to_string(channels);
  if (!lab.wants("block pooling forward", shape) && !lab.wants("block pooling backward", shape)) {
    return;
  }
  const std::int64_t size = batch * tokens * channels, blocks = tokens / kBlock,
                     features = batch * blocks * channels;
  const Half x = Half(size).fill_random(1), d_x(size), rounded(size);
  const Float divisor(batch * blocks), d_psi(features), psi(features), later(features),
      exact(features), exact_d_x(size);
  float *to_divisor = divisor.get(), *to_d_psi = d_psi.get();
  for_each(divisor.size(), [=] __device__(std::int64_t i) {
    to_divisor[i] = static_cast<float>(i % blocks * kBlock + 1);
    // So that all blocks have gradients of one size.
    for (std::int64_t c = 0; c < channels; ++c) {
      to_d_psi[i * channels + c] = to_divisor[i] * random_value(2, i * channels + c);
    }
  });
  const BlockPoolParams params{.dtype = KernelDtype::kBFloat16,
                               .vectors = true,
                               .cumulative = true,
                               .batch = batch,
                               .tokens = tokens,
                               .channels = channels,
                               .blocks = blocks,
                               .block = kBlock,
                               .mask = nullptr,
                               .divisor = divisor.get(),
                               .links = nullptr,
                               .x = x.get(),
                               .x_strides = {tokens * channels, channels},
                               .psi = psi.get(),
                               .d_psi = d_psi.get(),
                               .later = later.get(),
                               .d_x = d_x.get()};
  const Element* from = x.get();
  float *to = exact.get(), *to_d_x = exact_d_x.get();
  Element* to_rounded = rounded.get();
  for_each(batch * channels, [=] __device__(std::int64_t i) {
    const std::int64_t b = i / channels, c = i % channels;
    double sum = 0;
    for (std::int64_t t = 0; t < tokens; ++t) {
      sum += to_float(from[(b * tokens + t) * channels + c]);
      if (t % kBlock == 0) to[(b * blocks + t / kBlock) * channels + c] = sum / (t + 1);
    }
    double gradient = 0;
    for (std::int64_t t = tokens - 1; t >= 0; --t) {
      const std::int64_t at = (b * tokens + t) * channels + c;
      if (t % kBlock == 0) {
        gradient += params.d_psi[(b * blocks + t / kBlock) * channels + c] / (t + 1.0);
      }
      to_d_x[at] = static_cast<float>(gradient);
      to_rounded[at] = from_float<Element>(to_d_x[at]);
    }
  });
  Case forwards{"block pooling forward", shape, 2.0 * static_cast<double>(size), 0, 2 * size};
  forwards.launch = [=](int, cudaStream_t stream) {
    (void)divisor;
    launch_block_pool(params, stream);
  };
  forwards.outputs = {output("psi", psi, exact, exact)};
  forwards.outputs[0].epsilon = 0x1p-18f;  // a sum of hundreds of tokens
  if (lab.wants(forwards.kernel, shape)) lab.run(forwards);
  Case backwards{"block pooling backward", shape, 2.0 * static_cast<double>(size), 0, 2 * size};
  backwards.launch = [=](int, cudaStream_t stream) {
    (void)divisor, (void)later;
    launch_block_pool_backward(params, stream);
  };
  backwards.outputs = {output("d_x", d_x, exact_d_x, rounded)};
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
  activation(lab, ActivationKind::kGelu, "GELU", 65536, 2048);
  activation(lab, ActivationKind::kGeglu, "GEGLU", 65536, 2048);
  block_pool(lab, 128, 1024, 512);
  chunk_sums(lab, 52 << 20);
  adamw(lab, 52 << 20);
}

}  // namespace birkhoff::lab
