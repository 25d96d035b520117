// The candidates of `bench attention`, their inputs, and their errors.
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
#include "configs/schema/attention.pb.h"

namespace birkhoff {

struct AttentionShape {
  std::int64_t batch = 0, heads = 0, length = 0, head_dim = 0;
  bool causal = true;
};

// A mechanism with its own parameters. They are fp32, or fp64 if the computation is.
class BuiltMechanism {
 public:
  BuiltMechanism(const configs::Mechanism& config, const AttentionShape& shape,
                 at::ScalarType dtype, at::Device device);
  const Mechanism& operator*() const { return *mechanism_; }
  const Mechanism* operator->() const { return mechanism_.get(); }
  const Parameters& parameters() const { return parameters_; }
  // Copies them from a mechanism of the same configuration.
  void copy_parameters(const BuiltMechanism& from);

 private:
  Parameters parameters_;
  std::unique_ptr<Mechanism> mechanism_;
};

// Inputs, and the gradient of the output.
struct AttentionProblem {
  AttentionInput in;  // heads are views of [B, L, H, D], as layers make them
  at::Tensor d_out_BHLD;

  // Standard normal values. q, k and v have type `dtype`; x, the input of the SortNets, has the
  // parameters' type.
  static AttentionProblem random(const AttentionShape& shape, const MechanismTraits& traits,
                                 at::ScalarType dtype, at::Device device);
  // Copies: beginning() of the first sequence's first tokens, exact() of everything in fp64 on the
  // CPU.
  AttentionProblem beginning(std::int64_t num_tokens) const;
  AttentionProblem exact() const;

  // q, k unless it is q, x, and v unless it is k.
  std::vector<at::Tensor> leaves() const;

 private:
  AttentionProblem mapped(const std::function<at::Tensor(const at::Tensor&)>& each) const;
};

struct Candidate {
  std::string name;
  std::function<at::Tensor(const AttentionInput&)> out_BHLD;

  bool is_ours() const { return name == "birkhoff"; }
};

// LibTorch's scaled_dot_product_attention over every key: the CPU's, or one candidate per GPU
// kernel, by name.
std::vector<Candidate> dense_candidates(bool causal, at::Device device);

// Runs only the forward pass. Here and in solve(), LibTorch's candidates may sum in any order, ours
// may not.
void attend(const Candidate& candidate, const AttentionProblem& task);

// Returns the output, then the gradients of `leaves` (undefined for a leaf that the output does not
// depend on).
std::vector<at::Tensor> solve(const Candidate& candidate, const AttentionProblem& task,
                              const std::vector<at::Tensor>& leaves);

// The largest error of the output and the gradients. An error is the norm of the difference over
// the norm of the exact result. For a gradient, the denominator is at least a thousandth of the
// norm of all gradients, because a gradient that is zero by symmetry, such as the gradient of a
// bias that Sinkhorn normalization cancels, need not be exact. NaN if any error is NaN.
double error_of(const std::vector<at::Tensor>& results, const std::vector<at::Tensor>& exact);

// The largest error allowed in this dtype, for kernels and for LibTorch's plain operations alike.
double error_bound(at::ScalarType dtype);

}  // namespace birkhoff
