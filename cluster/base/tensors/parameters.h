// Named parameters of a model, in creation order. Initial values depend on (seed, name) alone, so
// adding a parameter leaves the others as they are, and every rank makes the same ones without
// communication.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace birkhoff {

// How a parameter starts.
struct Init {
  enum class Kind { kZeros, kOnes, kNormal, kUniform } kind = Kind::kZeros;
  double scale = 0;  // standard deviation (normal) or half width (uniform)

  static Init zeros() { return {Kind::kZeros, 0}; }
  static Init ones() { return {Kind::kOnes, 1}; }
  static Init normal(double standard_deviation) { return {Kind::kNormal, standard_deviation}; }
  static Init uniform(double half_width) { return {Kind::kUniform, half_width}; }
};

struct Parameter {
  std::string name;   // dotted path, for instance "blocks.0.attention.query.weight"
  at::Tensor value;   // a leaf that requires gradients; its storage may be moved into a bucket
  bool decay = true;  // weight decay applies (matrices, not biases, norms or single vectors)
};

class Parameters {
 public:
  // All parameters get this dtype, on this device; layers compute in `compute_dtype`.
  Parameters(std::uint64_t seed, at::ScalarType dtype, at::ScalarType compute_dtype,
             at::Device device)
      : seed_(seed), dtype_(dtype), compute_dtype_(compute_dtype), device_(device) {}
  Parameters(std::uint64_t seed, at::ScalarType dtype) : Parameters(seed, dtype, dtype, at::kCPU) {}

  // Makes and owns a parameter; the returned tensor shares it. An existing name is an internal
  // error.
  at::Tensor add(const std::string& name, at::IntArrayRef shape, Init init, bool decay);

  const std::vector<Parameter>& list() const { return list_; }
  std::int64_t num_elements() const;
  at::ScalarType dtype() const { return dtype_; }
  at::Device device() const { return device_; }
  // Of the layers' matrix products, and of what flows from one to the next.
  at::ScalarType compute_dtype() const { return compute_dtype_; }

 private:
  std::uint64_t seed_;
  at::ScalarType dtype_, compute_dtype_;
  at::Device device_;
  std::vector<Parameter> list_;
};

}  // namespace birkhoff
