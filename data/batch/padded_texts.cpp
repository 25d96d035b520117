#include "data/batch/padded_texts.h"

#include <ATen/ops/zeros.h>

#include <algorithm>

namespace birkhoff {

at::Tensor padded_ids(const std::vector<std::span<const std::int32_t>>& texts) {
  std::int64_t longest = 0;
  for (const auto& text : texts) longest = std::max(longest, std::ssize(text));
  const at::Tensor ids_BT = at::zeros({std::ssize(texts), longest}, at::kLong);
  auto* row = ids_BT.mutable_data_ptr<std::int64_t>();
  for (const auto& text : texts) {
    std::ranges::copy(text, row);
    row += longest;
  }
  return ids_BT;
}

at::Tensor numbers_of_ids(const std::vector<std::span<const std::int32_t>>& texts) {
  const at::Tensor numbers_B = at::zeros({std::ssize(texts)}, at::kLong);
  auto* number = numbers_B.mutable_data_ptr<std::int64_t>();
  for (const auto& text : texts) *number++ = std::ssize(text);
  return numbers_B;
}

Batch padded_texts(const std::vector<std::span<const std::int32_t>>& texts) {
  Batch batch;
  batch.fields.emplace(field::kInputs, padded_ids(texts));
  batch.fields.emplace(field::kLengths, numbers_of_ids(texts));
  batch.sample_ids_B = at::zeros({std::ssize(texts)}, at::kLong);
  return batch;
}

}  // namespace birkhoff
