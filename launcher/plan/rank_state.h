// The memory that one rank of a run holds between steps, the bytes that it sends in a step, and the
// bytes that it writes into a checkpoint. Computed with the run's own objects on LibTorch's meta
// device, which has sizes and no memory. Local.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "configs/schema/config.pb.h"
#include "launcher/measure/step_schedule.h"
#include "runtime/checkpoint/layout.h"

namespace birkhoff {

// Bytes of the memory of tensors, which may share some.
std::int64_t memory_bytes(const std::vector<at::Tensor>& tensors);

struct RankState {
  std::int64_t values_bytes = 0;  // parameters in their buckets, and statistics
  std::int64_t gradients_bytes = 0;
  // What ZeRO stages 2 and 3 add during a pass: gathered values and gradients of some buckets.
  std::int64_t passing_bytes = 0;
  std::int64_t optimizer_bytes = 0;
  // The buffer of a CPU run's group that receives the other ranks' slices of the longest bucket.
  std::int64_t exchange_bytes = 0;
  // Rank 0's step. Its computation is in FLOPs of matrix products. Empty unless asked for.
  StepSchedule schedule;
};
enum class WithSchedule { kNo, kYes };
// Error(kConfig) as make_model().
RankState rank_state(const configs::Config& config, std::int64_t vocabulary, int num_ranks,
                     WithSchedule with_schedule = WithSchedule::kYes);

struct SavedState {
  CheckpointSize size;
  std::int64_t copy_bytes = 0;  // of the rank that copies most
};
SavedState saved_state(const configs::Config& config, std::int64_t vocabulary, int num_ranks);

}  // namespace birkhoff
