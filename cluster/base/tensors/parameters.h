// Named parameters and statistics of a model, in creation order. Initial values depend only on
// (seed, name, element), so adding a parameter does not change the others, and every rank creates
// its part of the same values without communication.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cluster/base/interval.h"
#include "cluster/base/tensors/placement.h"

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
  TensorPlacement placement{};  // of the value in the global tensor
  int unit = 0;                 // Parameters::begin_unit()
  Initializer init{};
};

// Provides the values of parameters of which a rank keeps only slices (ZeRO stage 3, Rajbhandari et
// al. 2020, section 5.3). A unit is what one part of the network uses, for instance a layer. Calls
// are collective over the ranks that hold the slices.
class ParameterSlices {
 public:
  virtual ~ParameterSlices() = default;
  // Between these calls a forward pass may read the units' values. Uses may be nested.
  virtual void begin_use(const std::vector<int>& units) = 0;
  virtual void end_use(const std::vector<int>& units) = 0;
  // From here on, and until the next call, a backward pass may read these units' values.
  virtual void use_in_backward(const std::vector<int>& units) = 0;
};

// State that training updates once per step from sums over the global batch instead of gradients,
// for instance the centroids of online k-means. Data-parallel ranks hold the same values.
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
  TensorPlacement placement{};
};

class Parameters {
 public:
  // All parameters and statistics have this dtype and are placed there; layers compute in
  // `compute_dtype`.
  Parameters(std::uint64_t seed, at::ScalarType dtype, at::ScalarType compute_dtype,
             const ModelPlacement& place)
      : seed_(seed), dtype_(dtype), compute_dtype_(compute_dtype), place_(place) {}
  Parameters(std::uint64_t seed, at::ScalarType dtype) : Parameters(seed, dtype, dtype, at::kCPU) {}

  // Creates and owns this rank's part of a parameter of the global `shape`; the returned tensor
  // shares its memory. Error(kInternal) if the same elements of this name were added before.
  at::Tensor add(const std::string& name, at::IntArrayRef shape, Initializer init, bool decay,
                 const Split& split = {});
  // The same for a parameter with an entry for each head: `shape` is that of this rank's heads,
  // which are dimension 0. The global tensor has the heads of all ranks, in rank order.
  at::Tensor add_of_heads(const std::string& name, at::IntArrayRef shape, Initializer init,
                          bool decay);

  // Creates and owns a statistic of this rank's heads, as add_of_heads(). A forward pass with noise
  // returns its sums, of `sums_shape`, under the same name (LossSums).
  at::Tensor add_statistic(const std::string& name, at::IntArrayRef shape, Initializer init,
                           at::IntArrayRef sums_shape, Statistic::Update update,
                           Statistic::Describe describe = {});

  // Elements `range` (row-major) of the rank's tensor as it was added: [range.size()].
  at::Tensor initial_values(const Parameter& parameter, Interval range) const;

  // Begins a unit, to which the parameters belong that are added until the next call. Returns its
  // number. Units are counted in the order in which a forward pass uses them.
  int begin_unit() { return ++unit_; }

  const std::vector<Parameter>& list() const { return list_; }
  const std::vector<Statistic>& statistics() const { return statistics_; }
  // Of the parameters of the whole model, on all ranks of the tensor axis together.
  std::int64_t num_elements() const;
  at::ScalarType dtype() const { return dtype_; }
  at::Device device() const { return place_.device; }
  // The ranks that hold parts of this model.
  const ModelPlacement& place() const { return place_; }
  // Null: all values are on this rank at all times. `slices` must outlive their use.
  ParameterSlices* slices() const { return slices_; }
  void set_slices(ParameterSlices* slices) { slices_ = slices; }
  // The dtype of the layers' matrix products and of the activations between layers.
  at::ScalarType compute_dtype() const { return compute_dtype_; }

 private:
  void require_new(const std::string& name, const TensorPlacement& placement) const;
  at::Tensor initial(const std::string& name, const TensorPlacement& placement, Initializer init,
                     Interval range, at::IntArrayRef shape) const;
  std::vector<std::int64_t> shape_of_all_heads(at::IntArrayRef shape) const;

  std::uint64_t seed_;
  at::ScalarType dtype_, compute_dtype_;
  ModelPlacement place_;
  int unit_ = 0;
  ParameterSlices* slices_ = nullptr;
  std::vector<Parameter> list_;
  std::vector<Statistic> statistics_;
};

}  // namespace birkhoff
