#include "attention/kernels/sorted_blocks/existing_share.h"

#include <ATen/ATen.h>

namespace birkhoff {

ExistingShare::ExistingShare(const Blocks& blocks, const at::Tensor& weights_BHUN) {
  constexpr double kMinShare = 1e-20;
  const at::Tensor valid_B1Nb = blocks.valid_BNb().unsqueeze(1).to(weights_BHUN.scalar_type());
  const at::Tensor total_BHU1 = weights_BHUN.sum(3, /*keepdim=*/true);
  share_BHUb = at::matmul(weights_BHUN, valid_B1Nb) / total_BHU1.masked_fill(total_BHU1 == 0, 1);
  visible_BHUb = (share_BHUb <= kMinShare).logical_not();
  share_BHUb = share_BHUb.clamp_min(kMinShare);
}

at::Tensor ExistingShare::without_last_blocks(const Blocks& blocks,
                                              const at::Tensor& weights_BHUN) const {
  const at::Tensor& valid_BNb = blocks.valid_BNb();
  const std::int64_t last = blocks.block() - 1;
  // A block that ends too early has its first token and lacks its last one.
  const at::Tensor ends_early_BN =
      at::logical_and(valid_BNb.select(2, 0), valid_BNb.select(2, last).logical_not());
  return weights_BHUN.masked_fill(ends_early_BN.unsqueeze(1).unsqueeze(2), 0) /
         share_BHUb.select(3, last).unsqueeze(3);
}

}  // namespace birkhoff
