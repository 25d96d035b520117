// Configurations with fewer layers and shorter sequences, whose layers do the same work for each
// token. Local.
#pragma once

#include <cstdint>

#include "configs/schema/config.pb.h"

namespace birkhoff {

// The minimum number of tokens of a sequence on which layers can be tried: whole blocks, and at
// least twice the maximum that a query sees. data.sequence_length if that is less than twice as
// long.
std::int64_t trial_length(const configs::Config& config);

// `config`, resolved, for one rank on the CPU with `layers` layers of `attention` (null: as they
// are) and `sequences` sequences of `length` tokens. Fields with (parts_of_sequence) scale with the
// length. fp16 becomes bf16, and virtual shards and CUDA graphs are left out.
configs::Config smaller_config(const configs::Config& config, const configs::Attention* attention,
                               std::int64_t layers, std::int64_t sequences, std::int64_t length);

}  // namespace birkhoff
