// The paths of attention over gathered rows, for input for which choose_path() returns them.
#pragma once

#include "attention/kernels/gathered_attention/gathered_attention.h"

namespace birkhoff {

// Path::kReference: gathers the rows of all segments, padded to the longest.
AttentionPart attend_gathered_reference(const GatheredAttention& in);

// Path::kSdpa: the same segments as a batch of LibTorch's fused attention.
AttentionPart attend_gathered_sdpa(const GatheredAttention& in);

// Path::kFused: the loop of tile_attention/cpu_loop.h on the CPU, gpu_gathered.cu on a GPU. Nothing
// of size queries x keys is stored. Asynchronous on a CUDA device's current stream.
AttentionPart attend_gathered_fused(const GatheredAttention& in);

}  // namespace birkhoff
