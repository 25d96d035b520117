// diff_configs(): which fields differ, and which of them a resumed run may change.
#include <gtest/gtest.h>

#include "helpers.h"

namespace birkhoff {
namespace {

void expect_difference(const ConfigDifference& difference, const std::string& path,
                       const std::string& before, const std::string& after, bool fixed) {
  EXPECT_EQ(difference.path, path);
  EXPECT_EQ(difference.before, before) << path;
  EXPECT_EQ(difference.after, after) << path;
  EXPECT_EQ(difference.fixed, fixed) << path;
}

TEST(Diff, EqualConfigsHaveNone) { EXPECT_TRUE(diff_configs(parse(""), parse("")).empty()); }

TEST(Diff, ValuesInSchemaOrder) {
  const auto differences = diff_configs(
      parse(""), parse("train { seed: 2 steps: 5 precision: fp64 } data { corpus: \"x\" "
                       "sequence_length: 64 } model { dropout { residual: 0.5 } }"));
  ASSERT_EQ(differences.size(), 6u);
  expect_difference(differences[0], "data.corpus", "\"\"", "\"x\"", false);
  expect_difference(differences[1], "data.sequence_length", "256", "64", true);
  // Fixed by the option of the enclosing message.
  expect_difference(differences[2], "model.dropout.residual", "0", "0.5", true);
  expect_difference(differences[3], "train.steps", "1000", "5", false);
  expect_difference(differences[4], "train.seed", "1", "2", true);
  expect_difference(differences[5], "train.precision", "fp32", "fp64", true);
}

TEST(Diff, ListsAndChoices) {
  const auto differences = diff_configs(
      parse("train { optimizer { adamw {} } }"),
      parse("model { attention { group { mechanism { block_local { block: 8 } } } } attention {} } "
            "train { optimizer { adafactor {} } }"));
  ASSERT_EQ(differences.size(), 5u);
  const std::string mechanism = "model.attention.0.group.0.mechanism.",
                    dense =
                        "{ dropout: 0 normalizer: softmax kept_keys: 8 kept_divisor: 0 "
                        "keep_ties: false only_in_training: false }";
  expect_difference(differences[0], mechanism + "dense", dense, "(absent)", true);
  expect_difference(differences[1], mechanism + "block_local", "(absent)",
                    "{ block: 8 look_back: 0 dropout: 0 }", true);
  expect_difference(differences[2], "model.attention.1", "(absent)",
                    "{ group { heads: 4 mechanism { dense " + dense +
                        " sink: false "
                        "relative_positions { max_distance: 0 per_head: false values: true } } "
                        "key_heads: 0 } }",
                    true);
  EXPECT_EQ(differences[3].path, "train.optimizer.adamw");
  EXPECT_EQ(differences[4].path, "train.optimizer.adafactor");
  // Each optimizer has its own state: (fixed_choice).
  EXPECT_TRUE(differences[3].fixed);
  EXPECT_TRUE(differences[4].fixed);
}

TEST(Diff, WhatAFixedChoiceHoldsIsFree) {
  const auto differences =
      diff_configs(parse("train { optimizer { adamw { beta1: 0.5 } } }"),
                   parse("train { optimizer { adamw { beta1: 0.25 weight_decay: 0 } } }"));
  ASSERT_EQ(differences.size(), 2u);
  expect_difference(differences[0], "train.optimizer.adamw.beta1", "0.5", "0.25", false);
  EXPECT_EQ(differences[1].path, "train.optimizer.adamw.weight_decay");
  EXPECT_FALSE(differences[1].fixed);
}

}  // namespace
}  // namespace birkhoff
