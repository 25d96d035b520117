// Named parameters and statistics of a model, in creation order. Initial values depend only on
// (seed, name), so adding a parameter does not change the others, and every rank creates the same
// values without communication.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace birkhoff {

// The distribution of a parameter's initial values.
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

// State that training updates once per step from sums over the global batch instead of gradients,
// for instance the centroids of online k-means. All ranks hold the same values.
struct Statistic {
  // The next value from the value and the sums of a step. Reads nothing else; does not wait for the
  // device.
  using Update = std::function<at::Tensor(const at::Tensor& value, const at::Tensor& sums)>;
  // Describes a value in lines of text, for `birkhoff inspect`.
  using Describe = std::function<std::string(const at::Tensor& value)>;

  std::string name;  // dotted path, as of a parameter
  at::Tensor value;  // without gradients; the step changes it in place
  std::vector<std::int64_t> sums_shape;
  Update update;
  Describe describe;  // may be empty
};

class Parameters {
 public:
  // All parameters and statistics have this dtype and device; layers compute in `compute_dtype`.
  Parameters(std::uint64_t seed, at::ScalarType dtype, at::ScalarType compute_dtype,
             at::Device device)
      : seed_(seed), dtype_(dtype), compute_dtype_(compute_dtype), device_(device) {}
  Parameters(std::uint64_t seed, at::ScalarType dtype) : Parameters(seed, dtype, dtype, at::kCPU) {}

  // Creates and owns a parameter; the returned tensor shares its memory. Error(kInternal) if the
  // name exists.
  at::Tensor add(const std::string& name, at::IntArrayRef shape, Initializer init, bool decay);

  // Creates and owns a statistic; the returned tensor shares its memory. A forward pass with noise
  // returns its sums, of `sums_shape`, under the same name (LossSums). Errors as add().
  at::Tensor add_statistic(const std::string& name, at::IntArrayRef shape, Initializer init,
                           at::IntArrayRef sums_shape, Statistic::Update update,
                           Statistic::Describe describe = {});

  const std::vector<Parameter>& list() const { return list_; }
  const std::vector<Statistic>& statistics() const { return statistics_; }
  // Of the parameters.
  std::int64_t num_elements() const;
  at::ScalarType dtype() const { return dtype_; }
  at::Device device() const { return device_; }
  // The dtype of the layers' matrix products and of the activations between layers.
  at::ScalarType compute_dtype() const { return compute_dtype_; }

 private:
  void require_new(const std::string& name) const;
  at::Tensor initial(const std::string& name, at::IntArrayRef shape, Initializer init) const;

  std::uint64_t seed_;
  at::ScalarType dtype_, compute_dtype_;
  at::Device device_;
  std::vector<Parameter> list_;
  std::vector<Statistic> statistics_;
};

}  // namespace birkhoff
