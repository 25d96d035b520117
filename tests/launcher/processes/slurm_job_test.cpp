// Where ranks go on the nodes that respond.
#include "launcher/processes/slurm_job.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace birkhoff {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(Placement, HoldsWholeReplicasOnly) {
  const SlurmJob job{.id = "1", .nodes = {"a", "b", "c", "d"}, .step_name = "run"};
  const PlacementPolicy policy{.ranks = 12, .min_ranks = 4, .spare_nodes = 0, .multiple_of = 4};
  std::string why;
  const auto all = place(job, policy, job.nodes, why);
  ASSERT_TRUE(all);
  EXPECT_EQ(all->ranks, 12);
  // Three nodes have room for nine ranks, of which eight are two replicas.
  const auto fewer = place(job, policy, {"a", "b", "d"}, why);
  ASSERT_TRUE(fewer);
  EXPECT_EQ(fewer->ranks, 8);
  EXPECT_THAT(fewer->nodes, ElementsAre("a", "b", "d"));
  EXPECT_EQ(why, "");
  EXPECT_FALSE(place(job, policy, {"c"}, why));
  EXPECT_THAT(why, HasSubstr("1 of 4 nodes respond, and each has 3 ranks: too few for 4 ranks"));
}

}  // namespace
}  // namespace birkhoff
