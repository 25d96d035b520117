// Tensors that have memory in turn.
#include "cluster/base/tensors/tensor_memory.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace birkhoff {
namespace {

at::Tensor without_memory(std::int64_t elements) {
  const at::Tensor tensor = at::empty({elements});
  free_memory(tensor);
  return tensor;
}

TEST(TensorMemory, ViewsSeeTheMemoryThatATensorHasNow) {
  TensorMemory memory;
  const at::Tensor tensor = at::empty({8}), view = tensor.narrow(0, 4, 4);
  free_memory(tensor);
  EXPECT_FALSE(has_memory(tensor));
  for (const float value : {1.F, 2.F}) {
    memory.take(tensor);
    EXPECT_TRUE(has_memory(tensor));
    tensor.fill_(value);
    EXPECT_TRUE(view.eq(value).all().item<bool>());
    memory.free(tensor);
    EXPECT_FALSE(has_memory(tensor));
  }
}

TEST(TensorMemory, KeepsBlocksForTensorsOfAboutTheirSize) {
  TensorMemory memory;
  const at::Tensor large = without_memory(1000), half = without_memory(500),
                   small = without_memory(400);
  memory.take(large);
  const void* const block = large.const_data_ptr();
  memory.free(large);
  // A block that is more than twice as large stays.
  memory.take(small);
  EXPECT_NE(small.const_data_ptr(), block);
  memory.take(half);
  EXPECT_EQ(half.const_data_ptr(), block);
  // Nobody else has it now.
  memory.take(large);
  EXPECT_NE(large.const_data_ptr(), block);
  large.zero_();
  half.fill_(1);
  EXPECT_EQ(large.sum().item<float>(), 0);
  // It is still as large as it was.
  memory.free(half);
  memory.free(large);
  const at::Tensor other = without_memory(1000);
  memory.take(large);
  memory.take(other);
  EXPECT_TRUE(large.const_data_ptr() == block || other.const_data_ptr() == block);
}

TEST(TensorMemory, FreesWhatItDidNotGive) {
  TensorMemory memory;
  const at::Tensor own = at::ones({8}), without = without_memory(8), empty = at::empty({0});
  memory.free(own);
  EXPECT_FALSE(has_memory(own));
  memory.free(without);
  EXPECT_FALSE(has_memory(without));
  memory.take(empty);
  memory.free(empty);
  EXPECT_TRUE(has_memory(empty));
}

}  // namespace
}  // namespace birkhoff
