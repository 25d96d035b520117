// Calls an operator of the installed library through LibTorch's dispatcher.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <iostream>

int main() {
  const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("birkhoff::block_local_attention", "");
  const at::Tensor q = at::arange(2 * 3 * 8 * 4, at::kFloat).sin().view({2, 3, 8, 4});
  torch::jit::Stack stack;
  for (int i = 0; i < 3; ++i) stack.emplace_back(q);
  stack.emplace_back(8);  // the block: one block is dense attention
  for (std::size_t i = stack.size(); i < op.schema().arguments().size(); ++i) {
    stack.push_back(*op.schema().arguments()[i].default_value());
  }
  op.callBoxed(stack);
  const at::Tensor out = stack.at(0).toTensor();
  const at::Tensor expected =
      at::scaled_dot_product_attention(q, q, q, {}, /*dropout_p=*/0, /*is_causal=*/true);
  std::cout << "built for LibTorch " << BUILT_FOR << '\n';
  return at::allclose(out, expected, 1e-4, 1e-5) ? 0 : 1;
}
