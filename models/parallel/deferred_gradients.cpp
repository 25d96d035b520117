#include "models/parallel/deferred_gradients.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>

#include <memory>
#include <utility>
#include <vector>

#include "cluster/base/error.h"

namespace birkhoff {
namespace {

struct DeferredGradient {
  at::Tensor weight;
  std::function<at::Tensor()> gradient;
};
using DeferredGradients = std::vector<DeferredGradient>;

// Of this thread. Owned by the pass, so that one that fails leaves nothing behind. A pass inside
// another one adds to the outer one's if that has deferred something.
thread_local std::weak_ptr<DeferredGradients> of_pass;

void compute(DeferredGradients& deferred) {
  const c10::AutoGradMode no_gradients(false);
  for (const DeferredGradient& each : std::exchange(deferred, {})) {
    // Not added directly: the weight's hooks count its gradients.
    torch::autograd::backward({each.weight}, {each.gradient()});
  }
}

}  // namespace

void defer_gradient(const at::Tensor& weight, std::function<at::Tensor()> gradient) {
  require(weight.is_leaf() && weight.requires_grad(), "only a leaf's gradient can be deferred");
  std::shared_ptr<DeferredGradients> deferred = of_pass.lock();
  if (deferred == nullptr) {
    deferred = std::make_shared<DeferredGradients>();
    of_pass = deferred;
    torch::autograd::Engine::get_default_engine().queue_callback(
        [deferred]() mutable { compute(*std::exchange(deferred, nullptr)); });
  }
  deferred->push_back({weight, std::move(gradient)});
}

void compute_deferred_gradients() {
  if (const auto deferred = of_pass.lock()) compute(*deferred);
}

}  // namespace birkhoff
