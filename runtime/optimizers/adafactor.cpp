#include "runtime/optimizers/adafactor.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/sqrt.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>

#include "cluster/base/error.h"
#include "configs/schema/config.pb.h"
#include "runtime/gradients/fixed_order.h"

namespace birkhoff {
namespace {

constexpr std::int64_t kRowsOfBlock = 32;  // fixed, so that sums over rows have one order
constexpr std::int64_t kMinElementsPerThread = 16384;  // of a parallel loop

struct Matrix {
  std::int64_t num_rows, num_columns;
};

// The scalars of one update, in the parameters' precision.
template <typename T>
struct Factors {
  T gradient_scale, beta, epsilon1;
};

// One matrix: updates the mean squares of its rows R and columns C, and writes u.
template <typename T>
void factored_change(const T* g, T* rows, T* columns, T* u, Matrix matrix, const Factors<T>& f) {
  const auto [num_rows, num_columns] = matrix;
  const std::int64_t num_blocks = (num_rows + kRowsOfBlock - 1) / kRowsOfBlock;
  std::vector<double> column_sums(static_cast<std::size_t>(num_blocks * num_columns));
  at::parallel_for(0, num_blocks, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t block = begin; block < end; ++block) {
      double* of_block = column_sums.data() + block * num_columns;
      const std::int64_t last = std::min(num_rows, (block + 1) * kRowsOfBlock);
      for (std::int64_t r = block * kRowsOfBlock; r < last; ++r) {
        const T* row = g + r * num_columns;
        double row_sum = 0;
        for (std::int64_t c = 0; c < num_columns; ++c) {
          const T gradient = row[c] * f.gradient_scale;
          const double square = static_cast<double>(gradient * gradient + f.epsilon1);
          row_sum += square;
          of_block[c] += square;
        }
        rows[r] = f.beta * rows[r] + (1 - f.beta) * static_cast<T>(row_sum / num_columns);
      }
    }
  });
  for (std::int64_t block = 1; block < num_blocks; ++block) {
    for (std::int64_t c = 0; c < num_columns; ++c) {
      column_sums[c] += column_sums[block * num_columns + c];
    }
  }
  for (std::int64_t c = 0; c < num_columns; ++c) {
    columns[c] = f.beta * columns[c] + (1 - f.beta) * static_cast<T>(column_sums[c] / num_rows);
  }
  double row_mean = 0;
  for (std::int64_t r = 0; r < num_rows; ++r) row_mean += static_cast<double>(rows[r]);
  row_mean /= static_cast<double>(num_rows);

  std::vector<T> column_factors(static_cast<std::size_t>(num_columns));
  for (std::int64_t c = 0; c < num_columns; ++c) column_factors[c] = 1 / std::sqrt(columns[c]);
  at::parallel_for(0, num_blocks, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin * kRowsOfBlock; r < std::min(num_rows, end * kRowsOfBlock); ++r) {
      const T row_factor = f.gradient_scale / std::sqrt(rows[r] / static_cast<T>(row_mean));
      for (std::int64_t c = 0; c < num_columns; ++c) {
        u[r * num_columns + c] = g[r * num_columns + c] * row_factor * column_factors[c];
      }
    }
  });
}

// A vector: updates the mean square of each element, and writes u.
template <typename T>
void plain_change(const T* g, T* full, T* u, std::int64_t n, const Factors<T>& f) {
  at::parallel_for(0, n, kMinElementsPerThread, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const T gradient = g[i] * f.gradient_scale;
      full[i] = f.beta * full[i] + (1 - f.beta) * (gradient * gradient + f.epsilon1);
      u[i] = gradient / std::sqrt(full[i]);
    }
  });
}

template <typename T>
double rms(const T* x, std::int64_t n) {
  return std::sqrt(sum_of_squares(x, n) / static_cast<double>(n));
}

}  // namespace

Adafactor::Adafactor(const configs::Adafactor& config, GradBuckets& buckets)
    : decay_exponent_(config.decay_exponent()),
      clip_update_(config.clip_update()),
      epsilon1_(config.epsilon1()),
      epsilon2_(config.epsilon2()),
      scale_by_parameter_(config.scale_by_parameter()),
      num_updates_(at::zeros({1}, at::kDouble)) {
  require(!buckets.sliced() && buckets.place().tensor == nullptr,
          "Adafactor needs the gradients of whole matrices");
  std::int64_t most_elements = 0;
  for (const auto& bucket : buckets.buckets()) {
    for (const auto& slot : bucket.slots) {
      Entry entry;
      entry.name = slot.name;
      entry.owner = buckets.owner(bucket, slot.offset);
      entry.value = bucket.values.narrow(0, slot.offset, slot.elements).view(slot.shape);
      entry.gradient = bucket.gradients.narrow(0, slot.offset, slot.elements).view(slot.shape);
      if (slot.shape.size() >= 2) {
        entry.rows = at::zeros(entry.value.select(-1, 0).sizes(), entry.value.options());
        entry.columns = at::zeros(entry.value.select(-2, 0).sizes(), entry.value.options());
      } else {
        entry.full = at::zeros_like(entry.value);
      }
      most_elements = std::max(most_elements, slot.elements);
      entries_.push_back(std::move(entry));
    }
  }
  if (!entries_.empty()) change_ = at::empty({most_elements}, entries_[0].value.options());
}

void Adafactor::step(const StepScalars& scalars) {
  if (scalars.get(StepScalars::kApply) == 0) return;  // skips the whole step
  const double t = num_updates_.mutable_data_ptr<double>()[0] += 1;
  const double beta = 1 - std::pow(t, -decay_exponent_);
  for (Entry& entry : entries_) update(entry, scalars, beta);
}

void Adafactor::update(Entry& entry, const StepScalars& scalars, double beta) {
  if (entry.value.is_cuda()) return update_on_gpu(entry, scalars, beta);
  AT_DISPATCH_FLOATING_TYPES(entry.value.scalar_type(), "adafactor", [&] {
    const Factors<scalar_t> factors{static_cast<scalar_t>(scalars.get(StepScalars::kGradientScale)),
                                    static_cast<scalar_t>(beta), static_cast<scalar_t>(epsilon1_)};
    const std::int64_t n = entry.value.numel();
    const scalar_t* g = entry.gradient.const_data_ptr<scalar_t>();
    scalar_t* p = entry.value.mutable_data_ptr<scalar_t>();
    scalar_t* u = change_.mutable_data_ptr<scalar_t>();
    if (entry.full.defined()) {
      plain_change(g, entry.full.mutable_data_ptr<scalar_t>(), u, n, factors);
    } else {
      const Matrix matrix{entry.value.size(-2), entry.value.size(-1)};
      const std::int64_t size = matrix.num_rows * matrix.num_columns;
      for (std::int64_t m = 0; m < n / size; ++m) {
        factored_change(g + m * size, entry.rows.mutable_data_ptr<scalar_t>() + m * matrix.num_rows,
                        entry.columns.mutable_data_ptr<scalar_t>() + m * matrix.num_columns,
                        u + m * size, matrix, factors);
      }
    }
    double rate = scalars.get(StepScalars::kLearningRate);
    if (scale_by_parameter_) rate *= std::max(rms(p, n), epsilon2_);
    rate /= std::max(1.0, rms(u, n) / clip_update_);
    at::parallel_for(0, n, kMinElementsPerThread, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) p[i] -= static_cast<scalar_t>(rate) * u[i];
    });
  });
}

// The same with LibTorch operations.
void Adafactor::update_on_gpu(Entry& entry, const StepScalars& scalars, double beta) {
  const at::Tensor gradient = entry.gradient * scalars.get(StepScalars::kGradientScale);
  const at::Tensor square = gradient * gradient + epsilon1_;
  const auto move = [beta](const at::Tensor& mean, const at::Tensor& to) {
    mean.mul_(beta).add_(to, 1 - beta);
  };
  at::Tensor change;
  if (entry.full.defined()) {
    move(entry.full, square);
    change = gradient * at::rsqrt(entry.full);
  } else {
    move(entry.rows, square.mean(-1));
    move(entry.columns, square.mean(-2));
    const at::Tensor row_factors = at::rsqrt(entry.rows / entry.rows.mean(-1, /*keepdim=*/true));
    change = gradient * row_factors.unsqueeze(-1) * at::rsqrt(entry.columns).unsqueeze(-2);
  }
  const auto rms = [](const at::Tensor& x) { return at::sqrt((x * x).mean(at::kDouble)); };
  at::Tensor rate = (rms(change) / clip_update_).clamp_min(1).reciprocal() *
                    scalars.get(StepScalars::kLearningRate);
  if (scale_by_parameter_) rate = rate * rms(entry.value).clamp_min(epsilon2_);
  entry.value.sub_(change * rate.to(change.scalar_type()));
}

std::vector<TensorPart> Adafactor::state() {
  std::vector<TensorPart> parts;
  const auto add = [&](const char* prefix, const Entry& entry, const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    parts.push_back(whole_part(prefix + entry.name, StateKind::kOptimizer, tensor, entry.owner));
  };
  for (const Entry& entry : entries_) {
    add("adafactor.rows/", entry, entry.rows);
    add("adafactor.columns/", entry, entry.columns);
    add("adafactor.full/", entry, entry.full);
  }
  parts.push_back(whole_part("adafactor.num_updates", StateKind::kOptimizer, num_updates_, 0));
  return parts;
}

}  // namespace birkhoff
