#include "models/pixel_model.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones_like.h>

namespace birkhoff {

Batch PixelModel::tokens_of(const Batch& batch) {
  const at::Tensor values_BT = batch.at(field::kImages).flatten(1).to(at::kLong);
  const at::Tensor begin_B1 = at::full({values_BT.size(0), 1}, kBeginToken, values_BT.options());
  Batch tokens;
  tokens.fields.emplace(field::kInputs,
                        at::cat({begin_B1, values_BT.narrow(1, 0, values_BT.size(1) - 1)}, 1));
  tokens.fields.emplace(field::kTargets, values_BT);
  tokens.fields.emplace(field::kMask, at::ones_like(values_BT, at::TensorOptions(at::kByte)));
  tokens.sample_ids_B = batch.sample_ids_B;
  tokens.global_size = batch.global_size;
  return tokens;
}

}  // namespace birkhoff
