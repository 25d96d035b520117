#include "configs/loader/summary.h"

#include <gmock/gmock.h>

#include "helpers.h"

namespace birkhoff {
namespace {

using testing::ElementsAre;

TEST(Summary, AttentionIsNamedWithWhatIsNotItsDefault) {
  const auto text = [](const std::string& attention) {
    return attention_text(parse("model { " + attention + " }", {}).model());
  };
  EXPECT_EQ(text(""), "dense");
  EXPECT_EQ(text("attention { group { mechanism { dense { dropout: 0.5 } } } }"),
            "dense { dropout: 0.5 }");
  EXPECT_EQ(text("attention { group { mechanism { sinkhorn { block: 32 iterations: 5 } } } }"),
            "sinkhorn { block: 32 max_blocks: 8 }");
  EXPECT_EQ(text("attention { group { heads: 1 mechanism { block_local {} } } group {} }"),
            "1 head block_local, 3 heads dense");
  EXPECT_EQ(text("attention {} attention { group { mechanism { sinkhorn_mixture {} } } }"),
            "layers in turn: dense; sinkhorn_mixture { sinkhorn { max_blocks: 16 } }");
  EXPECT_EQ(attention_text(parse_config("task { translation {} } model { encoder { attention { "
                                        "group { mechanism { block_local {} } } } } }",
                                        "text", {})
                               .model()),
            "encoder: block_local | decoder: dense | cross-attention: dense");
  EXPECT_EQ(
      attention_text(parse("model { heads: 4 attention { group { heads: 2 key_heads: 1 mechanism { "
                           "block_local {} sink: true } } group { mechanism { dense {} } } } }",
                           {})
                         .model()),
      "2 heads block_local sink: true key_heads: 1, 2 heads dense");
}

TEST(Summary, LayersAndOptimizationAreNamedWithWhatIsNotTheirDefault) {
  const configs::Config plain = parse("model { channels: 16 }", {});
  EXPECT_EQ(layers_text(plain.model()), "4 layers, 16 channels, 4 heads");
  EXPECT_EQ(optimization_text(plain.train()), "adamw, cosine");
  const configs::Config other = parse(
      "model { channels: 16 layers: 1 heads: 2 head_channels: 5 norm: post attention_only: true } "
      "train { optimizer { sgd { nesterov: true } } "
      "schedule { shape: step_decay decay_epoch: [30, 60] } }",
      {});
  EXPECT_EQ(layers_text(other.model()),
            "1 layer, 16 channels, 2 heads of 5, post-norm, attention only");
  EXPECT_EQ(optimization_text(other.train()),
            "sgd { nesterov: true }, step_decay at epochs 30, 60");
}

TEST(Summary, FieldsThatDifferAreRowsInTheOrderOfTheSchema) {
  const std::vector<configs::Config> configs = {
      parse("train { steps: 5 }", {}), parse("train { steps: 7 } model { layers: 2 }", {}),
      parse("train { steps: 5 } model { attention {} attention {} }", {})};
  std::vector<std::string> rows;
  for (const DifferingField& field : differing_fields(configs)) {
    rows.push_back(field.path + " " + field.texts[0] + " " + field.texts[1] + " " + field.texts[2]);
  }
  EXPECT_THAT(rows,
              ElementsAre("model.layers 4 2 4", "model.attention.1.group.0.heads - - 4",
                          "model.attention.1.group.0.mechanism.dense.dropout - - 0",
                          "model.attention.1.group.0.mechanism.dense.normalizer - - softmax",
                          "model.attention.1.group.0.mechanism.dense.kept_keys - - 8",
                          "model.attention.1.group.0.mechanism.dense.kept_divisor - - 0",
                          "model.attention.1.group.0.mechanism.dense.keep_ties - - false",
                          "model.attention.1.group.0.mechanism.dense.only_in_training - - false",
                          "model.attention.1.group.0.mechanism.sink - - false",
                          "model.attention.1.group.0.mechanism.relative_positions."
                          "max_distance - - 0",
                          "model.attention.1.group.0.mechanism.relative_positions."
                          "per_head - - false",
                          "model.attention.1.group.0.mechanism.relative_positions."
                          "values - - true",
                          "model.attention.1.group.0.key_heads - - 0", "train.steps 5 7 5"));
  EXPECT_TRUE(differing_fields({configs[0], configs[0]}).empty());
}

}  // namespace
}  // namespace birkhoff
