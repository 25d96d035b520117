#include "launcher/bench/attention_comparison.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <optional>

namespace birkhoff {
namespace {

at::ScalarType parameter_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

// While it exists, scaled_dot_product_attention uses only this kernel on a GPU.
class OnlyKernel {
 public:
  explicit OnlyKernel(const std::string& name) {
    allow(name == "flash", name == "efficient", name == "cuDNN", false);
  }
  ~OnlyKernel() { allow(true, true, true, true); }
  OnlyKernel(const OnlyKernel&) = delete;
  OnlyKernel& operator=(const OnlyKernel&) = delete;

 private:
  static void allow(bool flash, bool efficient, bool cudnn, bool math) {
    at::Context& context = at::globalContext();
    context.setSDPUseFlash(flash);
    context.setSDPUseMemEfficient(efficient);
    context.setSDPUseCuDNN(cudnn);
    context.setSDPUseMath(math);
  }
};

// While it exists, LibTorch may sum in any order, as it does by default. Training forbids that on a
// GPU (cuda_device()); then LibTorch rejects cuDNN's attention, and flash attention's gradients are
// slower.
class AnyOrder {
 public:
  AnyOrder() { context_.setDeterministicAlgorithms(false, /*warn_only=*/false); }
  ~AnyOrder() { context_.setDeterministicAlgorithms(was_, /*warn_only=*/false); }
  AnyOrder(const AnyOrder&) = delete;
  AnyOrder& operator=(const AnyOrder&) = delete;

 private:
  at::Context& context_ = at::globalContext();
  const bool was_ = context_.deterministicAlgorithms();
};

}  // namespace

BuiltMechanism::BuiltMechanism(const configs::Mechanism& config, const AttentionShape& shape,
                               at::ScalarType dtype, at::Device device)
    : parameters_(/*seed=*/1, parameter_dtype(dtype), dtype, device),
      mechanism_(make_mechanism(config,
                                {.channels = shape.heads * shape.head_dim,
                                 .heads = shape.heads,
                                 .head_dim = shape.head_dim,
                                 .sequence_length = shape.length,
                                 .causal = shape.causal},
                                "MECHANISM", parameters_)) {}

void BuiltMechanism::copy_parameters(const BuiltMechanism& from) {
  const c10::AutoGradMode no_gradients(false);
  for (std::size_t i = 0; i < parameters_.list().size(); ++i) {
    parameters_.list()[i].value.copy_(from.parameters().list()[i].value);
  }
}

AttentionProblem AttentionProblem::random(const AttentionShape& shape,
                                          const MechanismTraits& traits, at::ScalarType dtype,
                                          at::Device device) {
  at::manual_seed(1);
  const auto normal = [&](at::IntArrayRef sizes, at::ScalarType type) {
    return at::randn(sizes, at::TensorOptions(parameter_dtype(dtype)).device(device)).to(type);
  };
  const auto heads = [&] {
    return normal({shape.batch, shape.length, shape.heads, shape.head_dim}, dtype).transpose(1, 2);
  };
  AttentionProblem task;
  task.in.q_BHLD = heads();
  task.in.k_BHSD = traits.shares_query_key ? task.in.q_BHLD : heads();
  task.in.v_BHSD = traits.ties_key_value ? task.in.k_BHSD : heads();
  task.in.x_q_BLC =
      normal({shape.batch, shape.length, shape.heads * shape.head_dim}, parameter_dtype(dtype));
  task.in.x_kv_BSC = task.in.x_q_BLC;
  task.d_out_BHLD = heads();
  for (const at::Tensor& leaf : task.leaves()) leaf.requires_grad_(true);
  return task;
}

AttentionProblem AttentionProblem::mapped(
    const std::function<at::Tensor(const at::Tensor&)>& each) const {
  AttentionProblem task;
  task.in.q_BHLD = each(in.q_BHLD.detach());
  task.in.k_BHSD = in.k_BHSD.is_same(in.q_BHLD) ? task.in.q_BHLD : each(in.k_BHSD.detach());
  task.in.v_BHSD = in.v_BHSD.is_same(in.k_BHSD) ? task.in.k_BHSD : each(in.v_BHSD.detach());
  task.in.x_q_BLC = each(in.x_q_BLC.detach());
  task.in.x_kv_BSC = task.in.x_q_BLC;
  task.d_out_BHLD = each(d_out_BHLD);
  for (const at::Tensor& leaf : task.leaves()) leaf.requires_grad_(true);
  return task;
}

AttentionProblem AttentionProblem::beginning(std::int64_t num_tokens) const {
  return mapped([&](const at::Tensor& x) {
    return x.narrow(0, 0, 1).narrow(x.dim() - 2, 0, num_tokens).clone();
  });
}

AttentionProblem AttentionProblem::exact() const {
  return mapped([](const at::Tensor& x) { return x.to(at::kCPU, at::kDouble, false, true); });
}

std::vector<at::Tensor> AttentionProblem::leaves() const {
  std::vector<at::Tensor> leaves{in.q_BHLD};
  if (!in.k_BHSD.is_same(in.q_BHLD)) leaves.push_back(in.k_BHSD);
  leaves.push_back(in.x_q_BLC);
  if (!in.v_BHSD.is_same(in.k_BHSD)) leaves.push_back(in.v_BHSD);
  return leaves;
}

std::vector<Candidate> dense_candidates(bool causal, at::Device device) {
  const auto attend = [causal](const AttentionInput& in) {
    return at::scaled_dot_product_attention(in.q_BHLD, in.k_BHSD, in.v_BHSD, {}, 0, causal);
  };
  if (device.is_cpu()) return {{"LibTorch, dense", attend}};
  std::vector<Candidate> candidates;
  for (const char* const kernel : {"flash", "efficient", "cuDNN"}) {
    const std::string name = kernel;
    candidates.push_back({"LibTorch, dense, " + name, [attend, name](const AttentionInput& in) {
                            const OnlyKernel only(name);
                            return attend(in);
                          }});
  }
  return candidates;
}

void attend(const Candidate& candidate, const AttentionProblem& task) {
  std::optional<AnyOrder> any_order;
  if (!candidate.is_ours()) any_order.emplace();
  const c10::AutoGradMode no_gradients(false);
  candidate.out_BHLD(task.in);
}

std::vector<at::Tensor> solve(const Candidate& candidate, const AttentionProblem& task,
                              const std::vector<at::Tensor>& leaves) {
  std::optional<AnyOrder> any_order;
  if (!candidate.is_ours()) any_order.emplace();
  const at::Tensor out = candidate.out_BHLD(task.in);
  std::vector<at::Tensor> results{out.detach()};
  const auto gradients = torch::autograd::grad({out}, leaves, {task.d_out_BHLD}, std::nullopt,
                                               /*create_graph=*/false, /*allow_unused=*/true);
  results.insert(results.end(), gradients.begin(), gradients.end());
  return results;
}

double error_of(const std::vector<at::Tensor>& results, const std::vector<at::Tensor>& exact) {
  const auto norm = [](const at::Tensor& x) { return x.defined() ? x.norm().item<double>() : 0; };
  double squares = 0;
  for (std::size_t i = 1; i < exact.size(); ++i) squares += norm(exact[i]) * norm(exact[i]);
  double worst = 0;
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (!results[i].defined() && !exact[i].defined()) continue;
    at::Tensor difference = exact[i];
    if (results[i].defined()) {
      difference = results[i].detach().to(at::kCPU, at::kDouble);
      if (exact[i].defined()) difference = difference - exact[i];
    }
    const double least = i == 0 ? 0 : 1e-3 * std::sqrt(squares);
    const double error = norm(difference) / std::max(norm(exact[i]), least);
    if (std::isnan(error)) return error;
    worst = std::max(worst, error);
  }
  return worst;
}

double error_bound(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return 1e-11;
    case at::kFloat:
      return 1e-4;
    case at::kHalf:
      return 0.02;
    default:
      return 0.05;
  }
}

}  // namespace birkhoff
