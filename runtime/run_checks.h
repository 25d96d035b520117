// What must hold before a run trains, and what its user should know. Errors name both values and
// what to do.
#pragma once

#include <cstdint>

#include "cluster/base/collectives/group.h"
#include "data/corpus/corpus.h"
#include "runtime/checkpoint/commit.h"

namespace birkhoff::configs {
class Config;
class Train;
}  // namespace birkhoff::configs

namespace birkhoff {

// All ranks have rank 0's. Collective over the world; Error(kConfig) and Error(kData) on all ranks.
void check_same_config(Group& world, const configs::Config& config);
void check_same_corpus(Group& world, const Corpus& corpus);

// A run can go on from the checkpoint: no fixed field of the configuration has changed
// (Error(kConfig)), nor the corpus (Error(kData)).
void check_resumable(const CheckpointFolder& checkpoint, const configs::Config& config,
                     const Corpus& corpus);

// Logs that there are ranks that compute no sequence of any batch, because there are more of them
// than there is work.
void warn_of_idle_ranks(const configs::Config& config, int num_ranks);

// Logs that a schedule changed where a run resumes, and with it the rate of its next step.
void warn_of_rate_jump(const configs::Train& before, const configs::Train& now,
                       std::int64_t next_step);

}  // namespace birkhoff
