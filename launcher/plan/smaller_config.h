// Configurations that a trial runs in place of a user's: on fewer and shorter sequences.
#pragma once

#include <cstdint>

#include "configs/schema/config.pb.h"

namespace birkhoff {

// The minimum number of tokens of a sequence on which layers can be tried: whole blocks, and at
// least twice the maximum that a query sees. data.sequence_length if that is less than twice as
// long, or if targets are longer or shorter than sources.
std::int64_t trial_length(const configs::Config& config);

// A resolved `config` for one rank on the CPU and `sequences` sequences of `length` tokens; targets
// of as many if they are as long as sources. fp16 becomes bf16, and virtual shards and CUDA graphs
// are left out.
configs::Config smaller_config(const configs::Config& config, std::int64_t sequences,
                               std::int64_t length);

}  // namespace birkhoff
