// Checks before a run trains: errors for what must hold, and warnings for the user. Errors name
// both values and what to do.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "cluster/base/collectives/process_group.h"
#include "data/corpus/corpus.h"
#include "runtime/checkpoint/commit.h"
#include "runtime/checkpoint/run_folder.h"

namespace birkhoff::configs {
class Config;
class Train;
}  // namespace birkhoff::configs

namespace birkhoff {

// Check that all ranks have rank 0's configuration, or its corpus. Collective over the world;
// Error(kConfig) and Error(kData) on all ranks.
void check_same_config(ProcessGroup& world, const configs::Config& config);
void check_same_corpus(ProcessGroup& world, const Corpus& corpus);

// Checks that this rank, on `host`, sees the folder of rank 0, the run `id`: that all ranks have
// one shared folder. A network file system may show a new folder late, so it waits for it, at most
// `patience`. Collective over the world; Error(kStorage) on all ranks.
void check_shared_folder(ProcessGroup& world, const std::string& host, const RunPaths& paths,
                         const std::string& id,
                         std::chrono::milliseconds patience = std::chrono::seconds(60));

// Checks that a run can resume from the checkpoint: no fixed field of the configuration has changed
// (Error(kConfig)), nor has the corpus (Error(kData)).
void check_resumable(const CheckpointFolder& checkpoint, const configs::Config& config,
                     const Corpus& corpus);

// Warns of settings that do less than they seem to: values without effect (a new run cannot have
// them, but one of an earlier version may), a warm-up that never ends, and more sequences per step
// than there are samples in an epoch.
void warn_of_settings(const configs::Config& config, std::int64_t num_samples);

// A warning if some of the data-parallel ranks compute no sequence of any batch, because there are
// more ranks than work; else "". Error(kConfig) if ZeRO stages 2 and 3 do not allow that.
std::string check_idle_ranks(const configs::Config& config, int num_ranks);

// A warning if the ranks of a node of mesh.ranks_per_node are on several hosts, if the field has no
// effect, or if it is not set where it would save traffic between hosts; else empty.
std::string warning_of_nodes(const configs::Config& config,
                             const std::vector<std::string>& host_of_rank);

// A warning if the ranks of a replica of the model (mesh.tensor) are on several hosts; else empty.
std::string warning_of_replicas(const configs::Config& config,
                                const std::vector<std::string>& host_of_rank);

// A warning if the run is on CPUs and LibTorch has no fast products in train.precision with this
// process's instruction set; else empty.
std::string warning_of_precision(const configs::Config& config);

// Warns if the schedule changed at a resume, and with it the learning rate of the next step, whose
// first sample belongs to `epoch`.
void warn_of_rate_jump(const configs::Train& before, const configs::Train& now,
                       std::int64_t next_step, std::int64_t epoch);

// Warns at a resume if losses of evaluations do not compare with those before it, and a setting
// compares them.
void warn_of_other_losses(const configs::Config& before, const configs::Config& now);

// Error(kConfig) if evaluate.patience is set and the corpus lacks evaluate.split.
void check_evaluation(const configs::Config& config, const Corpus& corpus);

}  // namespace birkhoff
