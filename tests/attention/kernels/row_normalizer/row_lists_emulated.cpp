#include "tests/attention/kernels/row_normalizer/row_lists_emulated.h"

#define launch_listed_values emulate_launch_listed_values
#define launch_listed_gradients emulate_launch_listed_gradients
#include "attention/kernels/row_normalizer/gpu_lists.cu"

namespace birkhoff::test {

void emulate_listed_values(const TopKParams& params) {
  emulate_launch_listed_values(params, nullptr);
}
void emulate_listed_gradients(const TopKParams& params) {
  emulate_launch_listed_gradients(params, nullptr);
}

}  // namespace birkhoff::test
