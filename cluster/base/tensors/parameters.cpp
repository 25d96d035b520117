#include "cluster/base/tensors/parameters.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <numbers>

#include "cluster/base/error.h"
#include "cluster/base/random/philox.h"

namespace birkhoff {
namespace {

// FNV-1a: part of the reproducibility promise, so it is written out here.
std::uint64_t name_hash(const std::string& name) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

// Four samples of the distribution from one block of random bits; normal samples by Box and
// Muller's method.
std::array<float, 4> draw(Initializer init, const std::array<std::uint32_t, 4>& bits) {
  std::array<float, 4> values;
  for (std::size_t i = 0; i < 4; i += 2) {
    const double u = uniform_from_bits(bits[i]), v = uniform_from_bits(bits[i + 1]);
    if (init.kind == Initializer::Kind::kNormal) {
      const double radius = init.scale * std::sqrt(-2 * std::log(u));
      values[i] = static_cast<float>(radius * std::cos(2 * std::numbers::pi * v));
      values[i + 1] = static_cast<float>(radius * std::sin(2 * std::numbers::pi * v));
    } else {
      values[i] = static_cast<float>(init.scale * (2 * u - 1));
      values[i + 1] = static_cast<float>(init.scale * (2 * v - 1));
    }
  }
  return values;
}

// Drawn in fp32 whatever the parameter's dtype, so that fp32 and fp64 models start equal.
at::Tensor draw_all(std::uint64_t key, const std::string& name, at::IntArrayRef shape,
                    Initializer init) {
  at::Tensor values = at::empty(shape, at::TensorOptions().dtype(at::kFloat));
  float* data = values.mutable_data_ptr<float>();
  const std::int64_t size = values.numel();
  const std::uint64_t stream = name_hash(name);
  at::parallel_for(0, (size + 3) / 4, 4096, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t quad = begin; quad < end; ++quad) {
      const auto drawn = draw(init, philox(key, stream, static_cast<std::uint64_t>(quad)));
      for (std::int64_t i = 0; i < 4 && 4 * quad + i < size; ++i) {
        data[4 * quad + i] = drawn[static_cast<std::size_t>(i)];
      }
    }
  });
  return values;
}

}  // namespace

void Parameters::require_new(const std::string& name) const {
  for (const Parameter& other : list_) require(other.name != name, "a parameter is added twice");
  for (const Statistic& other : statistics_) {
    require(other.name != name, "a statistic is added twice");
  }
}

at::Tensor Parameters::initial(const std::string& name, at::IntArrayRef shape,
                               Initializer init) const {
  const auto options = at::TensorOptions().dtype(dtype_).device(device_);
  switch (init.kind) {
    case Initializer::Kind::kZeros:
      return at::zeros(shape, options);
    case Initializer::Kind::kOnes:
      return at::ones(shape, options);
    case Initializer::Kind::kNormal:
    case Initializer::Kind::kUniform:
      break;
  }
  if (device_.is_meta()) return at::empty(shape, options);  // the model is only checked
  // Drawn on the host, so that every device starts with the same bits.
  return draw_all(noise_key(seed_, 0, 0, NoisePurpose::kInit), name, shape, init).to(options);
}

at::Tensor Parameters::add(const std::string& name, at::IntArrayRef shape, Initializer init,
                           bool decay) {
  require_new(name);
  const at::Tensor value = initial(name, shape, init).set_requires_grad(true);
  list_.push_back({name, value, decay});
  return value;
}

at::Tensor Parameters::add_statistic(const std::string& name, at::IntArrayRef shape,
                                     Initializer init, at::IntArrayRef sums_shape,
                                     Statistic::Update update, Statistic::Describe describe) {
  require_new(name);
  const at::Tensor value = initial(name, shape, init);
  statistics_.push_back({name, value, sums_shape.vec(), std::move(update), std::move(describe)});
  return value;
}

std::int64_t Parameters::num_elements() const {
  std::int64_t sum = 0;
  for (const Parameter& parameter : list_) sum += parameter.value.numel();
  return sum;
}

}  // namespace birkhoff
