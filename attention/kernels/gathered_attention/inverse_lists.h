// The inverse of row lists: the places of each row. Both functions set order and starts from rows
// and ends; entries of order after the last used place are arbitrary. Legend: see
// gathered_attention.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "attention/kernels/gathered_attention/gathered_attention.h"

namespace birkhoff {

// On any device; asynchronous on a GPU.
void invert_by_sorting(RowLists& lists);
// On the CPU, where it is faster.
void invert_by_counting(RowLists& lists);

// int64 [B, H, count]: how often each number of [0, count) occurs in numbers_BHP, which has no
// others. On any device; asynchronous on a GPU.
at::Tensor count_numbers(const at::Tensor& numbers_BHP, std::int64_t count);

}  // namespace birkhoff
