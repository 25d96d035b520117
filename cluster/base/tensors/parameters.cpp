#include "cluster/base/tensors/parameters.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <set>
#include <utility>

#include "cluster/base/error.h"
#include "cluster/base/random/philox.h"
#include "cluster/base/tensors/tensor_memory.h"
#include "cluster/base/tensors/tensor_region.h"

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

// Writes elements [first, first + size) of the tensor to `out`.
void draw_run(std::uint64_t key, std::uint64_t stream, Initializer init, std::int64_t first,
              std::int64_t size, float* out) {
  const std::int64_t end = first + size;
  at::parallel_for(first / 4, (end + 3) / 4, 4096, [&](std::int64_t begin, std::int64_t past) {
    for (std::int64_t quad = begin; quad < past; ++quad) {
      const auto drawn = draw(init, philox(key, stream, static_cast<std::uint64_t>(quad)));
      for (std::int64_t i = std::max(4 * quad, first); i < std::min(4 * quad + 4, end); ++i) {
        out[i - first] = drawn[static_cast<std::size_t>(i - 4 * quad)];
      }
    }
  });
}

// Elements `range` of the rank's tensor, in this shape. Drawn in fp32 whatever the parameter's
// dtype, so that fp32 and fp64 models start equal.
at::Tensor draw_range(std::uint64_t key, const std::string& name, const TensorPlacement& placement,
                      Initializer init, Interval range, at::IntArrayRef shape) {
  at::Tensor values = at::empty(shape, at::TensorOptions().dtype(at::kFloat));
  float* data = values.mutable_data_ptr<float>();
  const std::uint64_t stream = name_hash(name);
  const std::vector<std::int64_t> origin(placement.global_shape.size());
  const TensorRegion whole{placement.global_shape, origin, placement.global_shape, 0,
                           c10::multiply_integers(placement.global_shape)};
  std::int64_t begin = 0;  // of the box
  for (const TensorBox& box : placement.boxes) {
    const std::int64_t end = begin + c10::multiply_integers(box.size);
    const Interval common{std::max(begin, range.begin), std::min(end, range.end)};
    if (common.size() > 0) {
      const TensorRegion part{placement.global_shape, box.offset, box.size, common.begin - begin,
                              common.end - begin};
      for_each_common_run(whole, part, [&](const CommonRun& run) {
        draw_run(key, stream, init, run.begin_a, run.length, data + run.begin_b);
      });
      data += common.size();
    }
    begin = end;
  }
  return values;
}

}  // namespace

void Parameters::require_new(const std::string& name, const TensorPlacement& placement) const {
  const auto is_other = [&](const std::string& other, const TensorPlacement& of_other) {
    return other != name || (of_other.global_shape == placement.global_shape &&
                             of_other.boxes[0].offset != placement.boxes[0].offset);
  };
  for (const Parameter& other : list_) {
    require(is_other(other.name, other.placement), "a parameter is added twice");
  }
  for (const Statistic& other : statistics_) {
    require(is_other(other.name, other.placement), "a statistic is added twice");
  }
}

at::Tensor Parameters::initial(const std::string& name, const TensorPlacement& placement,
                               Initializer init, Interval range, at::IntArrayRef shape) const {
  const auto options = at::TensorOptions().dtype(dtype_).device(device());
  switch (init.kind) {
    case Initializer::Kind::kZeros:
      return at::zeros(shape, options);
    case Initializer::Kind::kOnes:
      return at::ones(shape, options);
    case Initializer::Kind::kNormal:
    case Initializer::Kind::kUniform:
      break;
  }
  if (device().is_meta()) return at::empty(shape, options);  // the model is only checked
  // Drawn on the host, so that every device starts with the same bits.
  return draw_range(noise_key(seed_, 0, 0, NoisePurpose::kInit), name, placement, init, range,
                    shape)
      .to(options);
}

at::Tensor Parameters::initial_values(const Parameter& parameter, Interval range) const {
  return initial(parameter.name, parameter.placement, parameter.init, range, {range.size()});
}

at::Tensor Parameters::add(const std::string& name, at::IntArrayRef shape, Initializer init,
                           bool decay, const Split& split) {
  TensorPlacement placement =
      place_tensor(shape.vec(), split, place_.tensor_rank, place_.tensor_size);
  require_new(name, placement);
  const std::vector<std::int64_t> local = local_shape(placement);
  at::Tensor value;
  if (place_.sliced) {
    value = at::empty(local, at::TensorOptions().dtype(dtype_).device(device()));
    free_memory(value);
  } else {
    value = initial(name, placement, init, {0, c10::multiply_integers(local)}, local);
  }
  value.set_requires_grad(true);
  list_.push_back({name, value, decay, std::move(placement), unit_, init});
  return value;
}

std::vector<std::int64_t> Parameters::shape_of_all_heads(at::IntArrayRef shape) const {
  std::vector<std::int64_t> global_shape = shape.vec();
  global_shape.at(0) *= place_.tensor_size;
  return global_shape;
}

at::Tensor Parameters::add_of_heads(const std::string& name, at::IntArrayRef shape,
                                    Initializer init, bool decay) {
  return add(name, shape_of_all_heads(shape), init, decay, {.dim = 0});
}

at::Tensor Parameters::add_statistic(const std::string& name, at::IntArrayRef shape,
                                     Initializer init, at::IntArrayRef sums_shape,
                                     Statistic::Update update, Statistic::Describe describe) {
  require(!sums_shape.empty(), "the sums of a statistic are those of heads");
  TensorPlacement placement =
      place_tensor(shape_of_all_heads(shape), {.dim = 0}, place_.tensor_rank, place_.tensor_size);
  require_new(name, placement);
  const std::vector<std::int64_t> local = local_shape(placement);
  const at::Tensor value =
      initial(name, placement, init, {0, c10::multiply_integers(local)}, local);
  statistics_.push_back({name, value, sums_shape.vec(), std::move(update), std::move(describe),
                         std::move(placement)});
  return value;
}

std::int64_t Parameters::num_elements() const {
  std::int64_t sum = 0;
  std::set<std::string> counted;
  for (const Parameter& parameter : list_) {
    if (!counted.insert(parameter.name).second) continue;  // another part of it is
    sum += c10::multiply_integers(parameter.placement.global_shape);
  }
  return sum;
}

}  // namespace birkhoff
