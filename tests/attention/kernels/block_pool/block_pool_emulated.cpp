// The GPU kernels of block pooling, run on the CPU by tests/emulated_cuda.
#include "tests/attention/kernels/block_pool/block_pool_emulated.h"

#define launch_block_pool emulate_launch_block_pool
#define launch_block_pool_backward emulate_launch_block_pool_backward
#include "attention/kernels/block_pool/gpu_pool.cu"

namespace birkhoff {

void emulate_block_pool(const BlockPoolParams& params) {
  emulate_launch_block_pool(params, nullptr);
}

void emulate_block_pool_backward(const BlockPoolParams& params) {
  emulate_launch_block_pool_backward(params, nullptr);
}

}  // namespace birkhoff
