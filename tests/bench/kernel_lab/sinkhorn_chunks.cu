// Mixing and attention of Sinkhorn blocks, a chunk of heads after the other: where a chunk's mixed
// keys fit the L2 cache, attention finds them there. One line for each number of chunks; the
// kernels' own programs check their results.
#include <cmath>

#include "attention/kernels/block_attention/gpu_params.h"
#include "attention/kernels/block_mix/gpu_params.h"
#include "attention/kernels/block_mix/gpu_products.h"
#include "tests/bench/kernel_lab/lab.h"

namespace birkhoff::lab {
namespace {

constexpr int kHeads = 64, kBlock = 64, kHeadDim = 64;

struct Tensors {
  Tensors(int blocks, std::uint64_t seed) : blocks(blocks) {
    for (int i = 0; i < 14; ++i) {
      rows.push_back(Half(std::int64_t{kHeads} * blocks * kBlock * kHeadDim).fill_random(seed + i));
    }
    weights = Half(std::int64_t{kHeads} * blocks * blocks);
    weights.fill_random(seed + 20, 0.01f);
    d_weights = Float(std::int64_t{64} * kHeads * blocks * blocks);
    for (int i = 0; i < 3; ++i) statistics.emplace_back(std::int64_t{kHeads} * blocks * kBlock);
  }

  BlockRowsParams at(int tensor, int head) const {
    const std::int64_t row = kHeadDim, block = row * kBlock, of_head = block * blocks;
    return {rows[static_cast<std::size_t>(tensor)].words() + head * of_head,
            {of_head, of_head, block, row}};
  }

  int blocks;
  std::vector<Half> rows;  // q, out, d_out, d_q, then k, v, sorted k, v, and their gradients
  Half weights;
  Float d_weights;
  std::vector<Float> statistics;
};

BlockAttentionParams attention_of(const Tensors& t, int head, int heads) {
  BlockAttentionParams p{};
  p.dtype = KernelDtype::kBFloat16;
  p.batch = heads;
  p.heads = p.group = 1;
  p.blocks = t.blocks;
  p.block = kBlock;
  p.head_dim = kHeadDim;
  p.scale = 1 / std::sqrt(static_cast<float>(kHeadDim));
  p.q = t.at(0, head);
  p.out = t.at(1, head);
  p.d_out = t.at(2, head);
  p.d_q = t.at(3, head);
  float* const numbers[3] = {t.statistics[0].get(), t.statistics[1].get(), t.statistics[2].get()};
  const std::int64_t first = std::int64_t{head} * t.blocks * kBlock;
  p.max = numbers[0] + first;
  p.inverse_sum = numbers[1] + first;
  p.delta = numbers[2] + first;
  p.num_sources = 2;
  for (int i = 0; i < 2; ++i) {  // sorted, own
    KeySourceParams& source = p.sources[i];
    source.first_mask = i;
    source.k = t.at(i == 0 ? 6 : 4, head);
    source.v = t.at(i == 0 ? 7 : 5, head);
    source.d_k = t.at(i == 0 ? 8 : 10, head);
    source.d_v = t.at(i == 0 ? 9 : 11, head);
  }
  return p;
}

BlockMixParams mix_of(const Tensors& t, int head, int heads) {
  BlockMixParams p{};
  p.dtype = KernelDtype::kBFloat16;
  p.batch = heads;
  p.heads = 1;
  p.blocks = t.blocks;
  p.block = kBlock;
  p.head_dim = kHeadDim;
  p.diagonal = t.blocks - 1;
  const std::int64_t size = std::int64_t{t.blocks} * t.blocks;
  p.weights = t.weights.words() + head * size;
  p.weight_strides[0] = p.weight_strides[1] = size;
  p.weight_strides[2] = t.blocks;
  p.num_tensors = 2;
  for (int i = 0; i < 2; ++i) {
    p.x[i] = t.at(4 + i, head);
    p.y[i] = t.at(6 + i, head);
    p.d_y[i] = t.at(8 + i, head);
    p.others[i] = t.at(10 + i, head);
    p.d_x[i] = t.at(12 + i, head);
  }
  p.parts = BlockMixShape::num_parts(p);
  p.d_weights = t.d_weights.get() + std::int64_t{head} * p.parts * size;
  return p;
}

}  // namespace

void cases(Lab& lab) {
  for (const int blocks : {16, 64, 256}) {
    const Tensors tensors[2] = {{blocks, 1}, {blocks, 100}};
    const double unit = 2.0 * kHeads * blocks * kBlock * kHeadDim;
    for (const bool backward : {false, true}) {
      for (const int chunks : {1, 2, 4, 8, 16, 32}) {
        Case each{std::string("mixing and attention ") + (backward ? "backward" : "forward"),
                  "L " + std::to_string(blocks * kBlock) + ", " + std::to_string(chunks) +
                      (chunks == 1 ? " chunk" : " chunks"),
                  unit * (backward ? 20 : 10), 0, std::int64_t{1} << 40};
        each.launch = [&, chunks, backward](int copy, cudaStream_t stream) {
          const Tensors& t = tensors[copy % 2];
          const int heads = kHeads / chunks;
          for (int head = 0; head < kHeads; head += heads) {
            if (backward) {
              launch_block_attention_backward(attention_of(t, head, heads), stream);
              launch_block_mix_backward(mix_of(t, head, heads), stream);
            } else {
              launch_block_mix(mix_of(t, head, heads), stream);
              launch_block_attention(attention_of(t, head, heads), stream);
            }
          }
        };
        if (lab.wants(each.kernel, each.shape)) lab.run(each);
      }
    }
  }
}

}  // namespace birkhoff::lab
