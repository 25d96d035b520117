// Who computes attention in `bench attention`, on which numbers, and how exactly.
//
// Legend: B batch, H heads, L tokens, D head dim, C = H D channels.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "attention/mechanism.h"
#include "configs/attention.pb.h"

namespace birkhoff {

struct AttentionShape {
  std::int64_t batch = 0, heads = 0, length = 0, head_dim = 0;
  bool causal = true;
};

// A mechanism with parameters of its own. They are fp32, fp64 where the computation is.
class BuiltMechanism {
 public:
  BuiltMechanism(const configs::Mechanism& config, const AttentionShape& shape,
                 at::ScalarType dtype, at::Device device);
  const Mechanism& operator*() const { return *mechanism_; }
  const Mechanism* operator->() const { return mechanism_.get(); }
  const Parameters& parameters() const { return parameters_; }
  // From a mechanism of the same configuration.
  void copy_parameters(const BuiltMechanism& from);

 private:
  std::unique_ptr<Group> group_;
  Parameters parameters_;
  std::unique_ptr<Mechanism> mechanism_;
};

// Inputs, and the gradient that comes back to the output.
struct AttentionTask {
  AttentionInput in;  // heads are views of [B, L, H, D], as layers make them
  at::Tensor d_out_BHLD;

  // Standard normal numbers. q, k, v of `dtype`; x, the SortNets' input, of the parameters'.
  static AttentionTask random(const AttentionShape& shape, bool tied, at::ScalarType dtype,
                              at::Device device);
  // Copies: the first sequence's first tokens; all in fp64 on the CPU.
  AttentionTask beginning(std::int64_t num_tokens) const;
  AttentionTask exact() const;

  // q, k, v (where it is no other's), x.
  std::vector<at::Tensor> leaves() const;

 private:
  AttentionTask mapped(const std::function<at::Tensor(const at::Tensor&)>& each) const;
};

struct Contender {
  std::string name;
  std::function<at::Tensor(const AttentionInput&)> out_BHLD;

  bool is_ours() const { return name == "birkhoff"; }
};

// LibTorch's scaled_dot_product_attention over every key: of the CPU, or each kernel that a GPU has
// by name.
std::vector<Contender> dense_contenders(bool causal, at::Device device);

// The forward pass alone. LibTorch's contenders may sum in any order, ours may not; here and in
// solve().
void attend(const Contender& contender, const AttentionTask& task);

// The output, then the gradients of `leaves` (undefined where it does not depend on one).
std::vector<at::Tensor> solve(const Contender& contender, const AttentionTask& task,
                              const std::vector<at::Tensor>& leaves);

// The largest error of the output and the gradients: the norm of what differs over the norm of the
// exact result or, for gradients, a thousandth of the norm of all where that is more, because a
// gradient that is zero by symmetry, as of biases that balancing takes out again, need not be
// exact. Not a number where one is none.
double error_of(const std::vector<at::Tensor>& results, const std::vector<at::Tensor>& exact);

// What it may be in this dtype, for kernels and for LibTorch's plain operations alike.
double error_bound(at::ScalarType dtype);

}  // namespace birkhoff
