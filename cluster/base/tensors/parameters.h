// Named parameters of a model, in creation order. Initial values depend only on (seed, name), so
// adding a parameter does not change the others, and every rank creates the same values without
// communication.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace birkhoff {

// How a parameter is initialized.
struct Initializer {
  enum class Kind { kZeros, kOnes, kNormal, kUniform } kind = Kind::kZeros;
  double scale = 0;  // standard deviation (normal) or half width (uniform)

  static Initializer zeros() { return {Kind::kZeros, 0}; }
  static Initializer ones() { return {Kind::kOnes, 1}; }
  static Initializer normal(double standard_deviation) {
    return {Kind::kNormal, standard_deviation};
  }
  static Initializer uniform(double half_width) { return {Kind::kUniform, half_width}; }
};

struct Parameter {
  std::string name;   // dotted path: "blocks.0.attention.query_key_value.weight"
  at::Tensor value;   // a leaf that requires gradients; its storage may be moved into a bucket
  bool decay = true;  // weight decay applies (matrices, not biases, norms or single vectors)
};

class Parameters {
 public:
  // All parameters have this dtype and device; layers compute in `compute_dtype`.
  Parameters(std::uint64_t seed, at::ScalarType dtype, at::ScalarType compute_dtype,
             at::Device device)
      : seed_(seed), dtype_(dtype), compute_dtype_(compute_dtype), device_(device) {}
  Parameters(std::uint64_t seed, at::ScalarType dtype) : Parameters(seed, dtype, dtype, at::kCPU) {}

  // Creates and owns a parameter; the returned tensor shares its memory. Error(kInternal) if the
  // name exists.
  at::Tensor add(const std::string& name, at::IntArrayRef shape, Initializer init, bool decay);

  const std::vector<Parameter>& list() const { return list_; }
  std::int64_t num_elements() const;
  at::ScalarType dtype() const { return dtype_; }
  at::Device device() const { return device_; }
  // The dtype of the layers' matrix products and of the activations between layers.
  at::ScalarType compute_dtype() const { return compute_dtype_; }

 private:
  std::uint64_t seed_;
  at::ScalarType dtype_, compute_dtype_;
  at::Device device_;
  std::vector<Parameter> list_;
};

}  // namespace birkhoff
