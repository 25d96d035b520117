#include "runtime/checkpoint/finite_state.h"

#include <ATen/Parallel.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "cluster/base/error.h"

namespace birkhoff {
namespace {

// A value is finite if its exponent has a bit that is 0. The tensor is checked and copied in blocks
// that fit into a core's cache, so that the copy does not read memory again.
template <typename Bits>
bool copy_bits(const at::Tensor& data, Bits exponent, std::byte* out) {
  constexpr std::int64_t kBlock = (std::int64_t{64} << 10) / sizeof(Bits);
  const auto* bits = static_cast<const Bits*>(data.const_data_ptr());
  std::atomic<bool> finite = true;
  at::parallel_for(0, data.numel(), kBlock, [&](std::int64_t begin, std::int64_t end) {
    Bits found = 0;
    for (std::int64_t block = begin; block < end; block += kBlock) {
      const std::int64_t block_end = std::min(block + kBlock, end);
#pragma omp simd reduction(| : found)
      for (std::int64_t i = block; i < block_end; ++i) {
        found |= static_cast<Bits>((bits[i] & exponent) == exponent);
      }
      if (out != nullptr) {
        std::memcpy(out + block * sizeof(Bits), bits + block, (block_end - block) * sizeof(Bits));
      }
    }
    if (found != 0) finite = false;
  });
  return finite;
}

// A bool on the GPU: whether all values are finite. If a value is NaN, both extremes are NaN.
// Unlike isfinite(data), this needs no memory of the size of the data.
at::Tensor all_finite_on_gpu(const at::Tensor& data) {
  const auto [low, high] = at::aminmax(data);
  return at::isfinite(low).logical_and(at::isfinite(high));
}

}  // namespace

bool all_finite(const at::Tensor& data, std::byte* copy) {
  switch (data.scalar_type()) {
    case at::kFloat:
      return copy_bits<std::uint32_t>(data, 0x7f800000, copy);
    case at::kDouble:
      return copy_bits<std::uint64_t>(data, 0x7ff0000000000000, copy);
    case at::kBFloat16:
      return copy_bits<std::uint16_t>(data, 0x7f80, copy);
    case at::kHalf:
      return copy_bits<std::uint16_t>(data, 0x7c00, copy);
    default:
      require(!data.is_floating_point(), "a dtype of state");
      if (copy != nullptr) std::memcpy(copy, data.const_data_ptr(), data.nbytes());
      return true;
  }
}

std::string find_non_finite(const std::vector<TensorPart>& parts) {
  std::vector<const TensorPart*> checked;
  std::vector<at::Tensor> finite;
  for (const TensorPart& part : parts) {
    if (!part.data.is_floating_point() || part.data.numel() == 0) continue;
    if (part.data.is_cpu()) {  // ranks with a GPU have such parts, too: counts of optimizers
      if (!all_finite(part.data)) return part.name;
      continue;
    }
    checked.push_back(&part);
    finite.push_back(all_finite_on_gpu(part.data));
  }
  if (finite.empty()) return "";
  const at::Tensor flags = at::stack(finite).cpu();  // one wait for the device
  for (std::size_t i = 0; i < checked.size(); ++i) {
    if (!flags.const_data_ptr<bool>()[i]) return checked[i]->name;
  }
  return "";
}

}  // namespace birkhoff
