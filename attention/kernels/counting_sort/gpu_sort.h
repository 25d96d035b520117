// Arguments of the GPU kernel of counting_sort.h.
#pragma once

#include <cstdint>

struct CUstream_st;

namespace birkhoff {

struct CountingSortParams {
  static constexpr int kMaxCount = 40'000;  // their counts fit the shared memory of sm_80

  std::int64_t heads;            // B H
  int slots, count;              // P, N
  const std::int32_t* numbers;   // [B H, P]
  const std::int32_t* used;      // [B H]; null: P
  std::int32_t *order, *starts;  // [B H, P] and [B H, N + 1]
  // SlotRanks, [B H, P]; null: not wanted. `ranks` if `positions`, `other_ranks` if `others`.
  std::int32_t *positions, *ranks;
  const std::int32_t* others;
  std::int32_t* other_ranks;
};

// Asynchronous on `stream`.
void launch_counting_sort(const CountingSortParams& params, CUstream_st* stream);

}  // namespace birkhoff
