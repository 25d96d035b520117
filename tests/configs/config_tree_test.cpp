// Every .txtpb in the tree loads, and contains what its comments promise.
#include <gtest/gtest.h>

#include "helpers.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;

const fs::path kTree = BIRKHOFF_SOURCE_DIR;

TEST(ConfigTree, EveryFileLoads) {
  int num_files = 0;
  for (const auto& entry : fs::recursive_directory_iterator(kTree / "configs")) {
    if (entry.path().extension() != ".txtpb" || entry.path().parent_path().filename() == "sites")
      continue;  // site profiles: site_test.cpp
    SCOPED_TRACE(entry.path());
    EXPECT_NO_THROW(load_config(entry.path(), {}));
    num_files += 1;
  }
  EXPECT_GE(num_files, 4);
}

TEST(ConfigTree, TheBabyGptsDifferInContextAndAttentionOnly) {
  const configs::Config dense = load_config(kTree / "configs/baby_gpt_dense.txtpb", {});
  EXPECT_EQ(dense.data().sequence_length(), 64);
  EXPECT_EQ(dense.train().global_batch(), 12);
  EXPECT_EQ(dense.train().steps(), 2000);
  EXPECT_TRUE(dense.model().attention(0).group(0).mechanism().has_dense());
  for (const char* name : {"local", "sinkhorn"}) {
    const configs::Config other =
        load_config(kTree / "configs" / ("baby_gpt_" + std::string(name) + ".txtpb"), {});
    for (const ConfigDifference& difference : diff_configs(dense, other)) {
      EXPECT_TRUE(difference.path == "data.sequence_length" ||
                  difference.path.starts_with("model.attention.0.group.0.mechanism."))
          << difference.path;
    }
    EXPECT_EQ(other.data().sequence_length(), 256);
  }
}

TEST(ConfigTree, NoneIsLeaky) {
  int with_sinkhorn = 0, with_routing = 0;
  for (const auto& entry : fs::directory_iterator(kTree / "configs")) {
    if (entry.path().extension() != ".txtpb") continue;
    SCOPED_TRACE(entry.path());
    const configs::Config config = load_config(entry.path(), {});
    for (const configs::Attention& attention : config.model().attention()) {
      for (const configs::HeadGroup& group : attention.group()) {
        const configs::Mechanism& mechanism = group.mechanism();
        EXPECT_NE(mechanism.sinkhorn().causal_balance(), configs::SinkhornAttention::paper_masked);
        EXPECT_NE(mechanism.sinkhorn_mixture().sinkhorn().causal_balance(),
                  configs::SinkhornAttention::paper_masked);
        EXPECT_EQ(mechanism.routing().causal_selection(), configs::RoutingAttention::causal_bucket);
        with_sinkhorn += mechanism.has_sinkhorn();
        with_routing += mechanism.has_routing();
      }
    }
  }
  EXPECT_GE(with_sinkhorn, 3);
  EXPECT_GE(with_routing, 10);
}

}  // namespace
}  // namespace birkhoff
