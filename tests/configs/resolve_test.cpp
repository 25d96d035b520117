// Resolving sets every default; resolving again changes nothing.
#include <gmock/gmock.h>
#include <google/protobuf/util/json_util.h>

#include "configs/loader/check.h"
#include "helpers.h"

namespace birkhoff {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

// Expects that every field outside oneofs is set, and one member of every oneof that is a choice. A
// oneof of one member is an option. Replaced fields are not set.
void expect_complete(const Message& message, const std::string& path) {
  const auto& reflection = *message.GetReflection();
  for (int i = 0; i < message.GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor* field = message.GetDescriptor()->field(i);
    const std::string at = path + "." + field->name();
    if (field->is_repeated()) {
      for (int j = 0; j < reflection.FieldSize(message, field); ++j) {
        expect_complete(reflection.GetRepeatedMessage(message, field, j), at);
      }
    } else if (const auto* oneof = field->real_containing_oneof()) {
      EXPECT_TRUE(reflection.HasOneof(message, oneof) || oneof->field_count() == 1) << at;
    } else {
      const bool replaced = field->options().GetExtension(configs::replaced);
      EXPECT_EQ(reflection.HasField(message, field), !replaced) << at;
    }
    if (!field->is_repeated() && field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE &&
        reflection.HasField(message, field)) {
      expect_complete(reflection.GetMessage(message, field), at);
    }
  }
}

TEST(Resolve, EverythingIsSet) {
  expect_complete(parse(""), "");
  expect_complete(parse("model { attention { group { mechanism { sinkhorn_mixture {} } } } } "
                        "train { optimizer { adafactor {} } }"),
                  "");
}

TEST(Resolve, TasksOfTwoSequencesHaveAnEncoder) {
  EXPECT_FALSE(parse("").model().has_encoder());
  const auto with = [](const std::string& encoder) {
    return parse_config(
        "task { translation {} } data { sequence_length: 64 } model { layers: 3 " + encoder + " }",
        "text", {});
  };
  const configs::Encoder empty = with("").model().encoder();
  EXPECT_EQ(empty.layers(), 3);
  EXPECT_TRUE(empty.attention(0).group(0).mechanism().has_dense());
  EXPECT_TRUE(empty.cross_attention(0).group(0).mechanism().has_dense());
  const configs::Encoder set =
      with("encoder { layers: 5 attention { group { mechanism { sinkhorn { block: 8 } } } } }")
          .model()
          .encoder();
  EXPECT_EQ(set.layers(), 5);
  EXPECT_EQ(set.attention(0).group(0).mechanism().sinkhorn().max_blocks(), 8);
  EXPECT_EQ(set.attention(0).group(0).heads(), 4);
  EXPECT_EQ(set.cross_attention(0).group(0).heads(), 4);
  // An encoder's lists are checked as the decoder's.
  EXPECT_THAT(config_error([&] {
                with("encoder { attention { group { mechanism { sinkhorn { block: 7 } } } } }");
              }),
              testing::HasSubstr("model.encoder.attention.0.group.0.mechanism.sinkhorn.block: "));
  EXPECT_THAT(config_error([&] { with("encoder { cross_attention { group { heads: 3 } } }"); }),
              testing::HasSubstr("model.encoder.cross_attention.0: its groups have 3 heads"));
}

// Blocks of the decoder divide targets; those of the encoder and of cross-attention, sources.
TEST(Resolve, TargetsHaveALengthOfTheirOwn) {
  const auto with = [](const std::string& task, const std::string& model) {
    return parse_config(
        "task { translation {" + task + "} } data { sequence_length: 64 } model { " + model + " }",
        "text", {});
  };
  const std::string sinkhorn = "attention { group { mechanism { sinkhorn { block: 8 } } } }";
  EXPECT_EQ(with("", "").task().translation().target_length(), 64);
  const configs::Config config =
      with("target_length: 24", sinkhorn + " encoder { " + sinkhorn + " }");
  EXPECT_EQ(target_length(config), 24);
  EXPECT_EQ(tokens_per_sample(config), 64 + 24);
  EXPECT_EQ(config.model().attention(0).group(0).mechanism().sinkhorn().max_blocks(), 3);
  EXPECT_EQ(config.model().encoder().attention(0).group(0).mechanism().sinkhorn().max_blocks(), 8);
  EXPECT_TRUE(useless_values(config).empty());
  EXPECT_EQ(target_length(parse("data { sequence_length: 48 }")), 48);
  EXPECT_EQ(tokens_per_sample(parse("data { sequence_length: 48 }")), 48);
  EXPECT_THAT(config_error([&] { with("target_length: 20", sinkhorn); }),
              testing::HasSubstr("task.translation.target_length 20 is not a multiple"));
  with("target_length: 20", "encoder { " + sinkhorn + " }");  // is accepted
  EXPECT_THAT(config_error([&] {
                with("target_length: 24",
                     "attention { group { mechanism { sinkhorn { block: 8 max_blocks: 2 } } } }");
              }),
              testing::HasSubstr("(task.translation.target_length 24 / block 8)"));
}

TEST(Resolve, NoiseOfAttentionIsFoundWhereverItIs) {
  const auto noisy = [](const std::string& model) {
    return has_attention_noise(
        parse_config("task { translation {} } model { dropout { residual: 0.1 embedding: 0.1 } " +
                         model + " }",
                     "text", {})
            .model());
  };
  EXPECT_FALSE(noisy(""));
  EXPECT_FALSE(noisy("attention { group { mechanism { sinkhorn { block: 8 } } } }"));
  EXPECT_TRUE(noisy("attention { group { mechanism { dense { dropout: 0.1 } } } }"));
  EXPECT_TRUE(
      noisy("encoder { attention {} attention { group { mechanism { sinkhorn { block: 8 "
            "gumbel_noise: true } } } } }"));
  EXPECT_TRUE(noisy(
      "encoder { cross_attention { group { mechanism { sortcut { blocks: 2 sinkhorn { block: 8 "
      "gumbel_noise: true } } } } } }"));
}

TEST(Resolve, ChoicesAndDerivedValues) {
  const configs::Config config = parse(
      "data { sequence_length: 512 } model { channels: 96 heads: 6 "
      "attention { group { heads: 2 mechanism { sinkhorn { block: 8 } } } group {} } "
      "attention { group { mechanism { sinkhorn_mixture { sinkhorn { block: 32 } } } } } "
      "attention {} }");
  EXPECT_TRUE(config.train().optimizer().has_adamw());
  EXPECT_EQ(config.model().feed_forward(), 384);
  const auto& first = config.model().attention(0);
  EXPECT_EQ(first.group(0).mechanism().sinkhorn().max_blocks(), 64);
  EXPECT_EQ(first.group(1).heads(), 4);
  EXPECT_TRUE(first.group(1).mechanism().has_dense());
  EXPECT_EQ(config.model().attention(1).group(0).heads(), 6);
  EXPECT_EQ(
      config.model().attention(1).group(0).mechanism().sinkhorn_mixture().sinkhorn().max_blocks(),
      16);
  EXPECT_TRUE(config.model().attention(2).group(0).mechanism().has_dense());
  ASSERT_EQ(parse("").model().attention_size(), 1);
  EXPECT_TRUE(parse("").model().attention(0).group(0).mechanism().has_dense());
}

TEST(Resolve, WhatIsSetStays) {
  const configs::Config config = parse(
      "model { feed_forward: 100 bias: true norm_epsilon: 1e-6 attention { group { mechanism { "
      "sinkhorn { max_blocks: 40 iterations: 0 } } } } } train { clip_norm: 0 }");
  EXPECT_EQ(config.model().feed_forward(), 100);
  EXPECT_TRUE(config.model().bias());
  EXPECT_FLOAT_EQ(config.model().norm_epsilon(), 1e-6f);
  EXPECT_EQ(config.model().attention(0).group(0).mechanism().sinkhorn().max_blocks(), 40);
  EXPECT_EQ(config.model().attention(0).group(0).mechanism().sinkhorn().iterations(), 0);
  EXPECT_EQ(config.train().clip_norm(), 0);
}

// Only causal tasks use the prefix balance.
TEST(Resolve, LongEncodersKeepTheDefaultBalance) {
  const char* text =
      "data { sequence_length: 8192 } model { attention { group { mechanism { sinkhorn {} } } } }";
  EXPECT_THAT(config_error([&] { parse(text); }), testing::HasSubstr("at most 256 blocks"));
  EXPECT_NO_THROW(parse_config("task { classification {} } " + std::string(text), "text", {}));
  EXPECT_NO_THROW(
      parse(text, {"model.attention.0.group.0.mechanism.sinkhorn.causal_balance=none"}));
}

TEST(ConfigText, IsInSchemaOrderAndReadsBack) {
  const configs::Config config = parse(
      "train { seed: 18446744073709551615 } data { corpus: \"gr\xc3\xbc\xc3\x9f \\\"x\\\"\" }");
  const std::string text = config_text(config);
  EXPECT_LT(text.find("task {"), text.find("\ndata {"));
  EXPECT_LT(text.find("\ndata {"), text.find("\nmodel {"));
  EXPECT_LT(text.find("attention {"), text.find("positions:"));
  EXPECT_THAT(text, testing::HasSubstr("gr\xc3\xbc\xc3\x9f"));
  EXPECT_TRUE(equal(parse_config(text, "text", {}), config));
}

// Checkpoints keep the config in Protobuf's JSON mapping.
TEST(ConfigText, SurvivesJson) {
  const configs::Config config =
      parse("train { seed: 18446744073709551615 schedule { learning_rate: 0.1 } }");
  std::string json;
  ASSERT_TRUE(google::protobuf::util::MessageToJsonString(config, &json).ok());
  configs::Config back;
  ASSERT_TRUE(google::protobuf::util::JsonStringToMessage(json, &back).ok());
  EXPECT_TRUE(equal(back, config));
}

}  // namespace
}  // namespace birkhoff
