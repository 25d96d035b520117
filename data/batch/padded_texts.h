// Texts of different lengths as tensors whose rows are padded.
//
// Legend: B texts, T tokens of the longest one.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "data/batch/batch.h"

namespace birkhoff {

// The ids of each text, int64 [B, T] on the host, with zeros behind them.
at::Tensor padded_ids(const std::vector<std::span<const std::int32_t>>& texts);

// The number of ids of each text, int64 [B] on the host.
at::Tensor numbers_of_ids(const std::vector<std::span<const std::int32_t>>& texts);

// The batch of an encoder: both as inputs and lengths. The sample ids are 0.
Batch padded_texts(const std::vector<std::span<const std::int32_t>>& texts);

}  // namespace birkhoff
