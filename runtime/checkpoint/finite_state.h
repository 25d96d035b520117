// Whether a state is one to go on from: a parameter or a moment that is not finite stays so in all
// later steps.
#pragma once

#include <string>
#include <vector>

#include "cluster/base/collectives/group.h"
#include "runtime/checkpoint/named_shard.h"

namespace birkhoff {

// The name of the first tensor, in the order of ranks, of which a shard that its rank owns holds a
// value that is not finite; empty if there is none. Reads all of the state once. Collective over
// `world`; the same on all ranks.
std::string find_non_finite(const std::vector<NamedShard>& shards, Group& world);

// The same for what one process holds, whoever owns it. Local.
std::string find_non_finite(const std::vector<NamedShard>& shards);

}  // namespace birkhoff
