// The GPU kernels of attention over gathered rows, run on the CPU by tests/emulated_cuda.
#define launch_gathered_slots emulate_launch_gathered_slots
#define launch_gathered_merge emulate_launch_gathered_merge
#define launch_gathered_attention_backward emulate_launch_gathered_attention_backward
#define launch_sums_of_slots emulate_launch_sums_of_slots
#define launch_counting_sort emulate_launch_number_groups
#define launch_gathered_tiles emulate_launch_gathered_tiles
#define launch_gathered_tiles_backward emulate_launch_gathered_tiles_backward
#include "tests/attention/kernels/gathered_attention/gathered_emulated.h"
#include "attention/kernels/counting_sort/gpu_sort.cu"
#include "attention/kernels/gathered_attention/gpu_gathered.cu"

namespace birkhoff {

float4 gathered_memory[232448 / sizeof(float4)];
int group_memory[232448 / sizeof(int)];

namespace {
const test::EmulatedTiles* emulated_tiles = nullptr;  // of the call that is running
}  // namespace

template <int>
void launch_gathered_tiles(const GatheredParams& params, cudaStream_t) {
  emulated_tiles->forward(params);
}
template <int>
void launch_gathered_tiles_backward(const GatheredParams& params, cudaStream_t) {
  emulated_tiles->backward(params);
}

namespace test {

void emulate_number_groups(const CountingSortParams& params) {
  emulate_launch_number_groups(params, nullptr);
}

void emulate_gathered_slots(const GatheredParams& params, const EmulatedTiles* tiles) {
  emulated_tiles = tiles;
  emulate_launch_gathered_slots(params, nullptr);
}
void emulate_gathered_merge(const GatheredParams& params) {
  emulate_launch_gathered_merge(params, nullptr);
}

void emulate_gathered_attention_backward(const GatheredParams& params, const EmulatedTiles* tiles) {
  emulated_tiles = tiles;
  emulate_launch_gathered_attention_backward(params, nullptr);
}
void emulate_sums_of_slots(const GatheredParams& params, const RowsParams& numbers, int columns,
                           const RowsParams& sums) {
  emulate_launch_sums_of_slots(params, numbers, columns, sums, nullptr);
}

}  // namespace test
}  // namespace birkhoff
