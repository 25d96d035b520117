#include "launcher/measure/flop_counter.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <string_view>

namespace birkhoff {
namespace {

thread_local double flops_of_thread = 0;

// Of the product of the operands at `first` and `first + 1`: [.., m, k] x [.., k, n].
double product_flops(c10::ArrayRef<const c10::IValue> inputs, std::size_t first) {
  const at::Tensor a = inputs[first].toTensor(), b = inputs[first + 1].toTensor();
  return 2.0 * static_cast<double>(a.numel()) * static_cast<double>(b.size(-1));
}

std::unique_ptr<at::ObserverContext> count_product(const at::RecordFunction& call) {
  const std::string_view name = call.name();
  if (name == "aten::mm" || name == "aten::bmm") {
    flops_of_thread += product_flops(call.inputs(), 0);
  } else if (name == "aten::addmm" || name == "aten::baddbmm") {
    flops_of_thread += product_flops(call.inputs(), 1);
  }
  return nullptr;
}

}  // namespace

FlopCounter::FlopCounter()
    : callback_(
          at::addThreadLocalCallback(at::RecordFunctionCallback(count_product).needsInputs(true))) {
  flops_of_thread = 0;
}

FlopCounter::~FlopCounter() { at::removeCallback(callback_); }

double FlopCounter::flops() const { return flops_of_thread; }

}  // namespace birkhoff
