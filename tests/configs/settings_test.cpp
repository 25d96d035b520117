// --set path=value.
#include <gmock/gmock.h>

#include "helpers.h"

namespace birkhoff {
namespace {

using testing::HasSubstr;

configs::Config set(const std::vector<std::string>& settings) { return parse("", settings); }

TEST(Settings, Values) {
  EXPECT_EQ(set({"train.steps=5"}).train().steps(), 5);
  EXPECT_EQ(set({"train.steps=5", "train.steps=6"}).train().steps(), 6);
  EXPECT_EQ(set({"train.steps=1e3"}).train().steps(), 1000);
  EXPECT_EQ(set({"train.steps=1.5E+4"}).train().steps(), 15000);
  EXPECT_EQ(set({"train.seed=5e9"}).train().seed(), 5000000000u);
  EXPECT_EQ(set({"train.seed=18446744073709551615"}).train().seed(), 18446744073709551615u);
  EXPECT_TRUE(set({"model.bias=true"}).model().bias());
  EXPECT_FLOAT_EQ(set({"train.schedule.learning_rate=1e-4"}).train().schedule().learning_rate(),
                  1e-4f);
  EXPECT_EQ(set({"train.precision=fp64"}).train().precision(), configs::Train::fp64);
  EXPECT_EQ(set({"data.corpus=/a b/c=d"}).data().corpus(), "/a b/c=d");
  EXPECT_EQ(set({"data.corpus=\"x\\\"y\""}).data().corpus(), "x\"y");
  EXPECT_EQ(set({"data.corpus="}).data().corpus(), "");
  EXPECT_EQ(set({"data.corpus=it's"}).data().corpus(), "it's");
}

// Runs of earlier versions say `zero: true`; a later value wins, under either name.
TEST(Settings, TheFormerNameOfZeroStage) {
  const auto stage = [](const std::string& text, const std::vector<std::string>& settings) {
    const configs::Config config = parse(text, settings);
    EXPECT_FALSE(config.train().has_zero());
    return config.train().zero_stage();
  };
  EXPECT_EQ(stage("train { zero: true }", {}), 1);
  EXPECT_EQ(stage("train { zero: false }", {}), 0);
  EXPECT_EQ(stage("train { zero: true }", {"train.zero_stage=0"}), 0);
  EXPECT_EQ(stage("train { zero_stage: 0 }", {"train.zero=true"}), 1);
  EXPECT_EQ(stage("", {"train={zero: true}"}), 1);
  EXPECT_THAT(config_error([] { parse("train { zero: true zero_stage: 0 }", {}); }),
              HasSubstr("train.zero: is the former name of zero_stage; set only one of them"));
  EXPECT_THAT(config_error([] { parse("", {"train.zero_stage=4"}); }),
              HasSubstr("train.zero_stage: must be in [0, 3], is 4"));
}

TEST(Settings, ListsByIndex) {
  const configs::Config config = set({"model.attention.0.group.0.mechanism.sinkhorn.block=32",
                                      "model.attention.0.group.0.heads=3",
                                      "model.attention.0.group.1.mechanism.dense.dropout=0.5",
                                      "model.attention.1={group{mechanism{block_local{}}}}"});
  ASSERT_EQ(config.model().attention_size(), 2);
  const auto& first = config.model().attention(0);
  ASSERT_EQ(first.group_size(), 2);
  EXPECT_EQ(first.group(0).mechanism().sinkhorn().block(), 32);
  EXPECT_EQ(first.group(0).mechanism().sinkhorn().max_blocks(), 8);
  EXPECT_EQ(first.group(1).heads(), 1);
  EXPECT_FLOAT_EQ(first.group(1).mechanism().dense().dropout(), 0.5f);
  EXPECT_TRUE(config.model().attention(1).group(0).mechanism().has_block_local());
}

TEST(Settings, MessagesAndListsAreReplaced) {
  const configs::Config config = parse(
      "model { attention { group { heads: 1 } group {} } } train { schedule { warmup_steps: 7 } }",
      {"model.attention.0={group{mechanism{dense{}}}}", "train.schedule={ shape: constant }"});
  EXPECT_EQ(config.model().attention(0).group_size(), 1);
  EXPECT_EQ(config.train().schedule().warmup_steps(), 100);
  EXPECT_EQ(config.train().schedule().shape(), configs::Schedule::constant);
  const configs::Config list =
      set({"model.attention=[{group{}}, {group{mechanism{block_local{}}}}]", "model.layers=2"});
  EXPECT_EQ(list.model().attention_size(), 2);
  EXPECT_EQ(
      parse("model { attention {} attention {} }", {"model.attention=[]"}).model().attention_size(),
      1);  // resolved: dense
}

TEST(Settings, APathChoosesTheMemberOfAOneof) {
  EXPECT_TRUE(set({"train.optimizer.adafactor.clip_update=2"}).train().optimizer().has_adafactor());
  EXPECT_TRUE(set({"task.classification.classes=5"}).task().has_classification());
  EXPECT_TRUE(set({"task.translation={}"}).task().has_translation());
}

struct BadSetting {
  const char* setting;
  const char* what;  // after "--set <setting>: "
};

const BadSetting kBadSettings[] = {
    {"train.stepz=5", "unknown field 'stepz' in train; did you mean 'steps'?"},
    {"trian.steps=5", "unknown field 'trian' in the configuration; did you mean 'train'?"},
    {"steps=5", "unknown field 'steps' in the configuration; did you mean train.steps?"},
    {"train.steps", "expected path=value"},
    {"=5", "expected path=value"},
    {"", "expected path=value"},
    {"train.=5", "unknown field '' in train"},
    {".train=5", "unknown field '' in the configuration"},
    {"train..steps=5", "unknown field '' in train"},
    {"train.steps=", "the value is missing"},
    {"train.steps= ", "the value is missing"},
    {"train.steps=abc", "expected an integer, got 'abc'"},
    {"train.steps=1.5", "expected an integer, got '1.5'"},
    {"model.layers=010", "'010' starts with a zero, which would make it octal"},
    {"train.steps=08", "'08' starts with a zero"},
    {"train.steps=1.5e0", "expected an integer, got '1.5e0'"},
    {"train.steps=1e30", "expected an integer, got '1e30'"},
    {"train.steps=1e13", "must be in [1, 1000000000000], is 10000000000000"},
    {"device=gpu", "unknown value 'gpu'; allowed: cpu, cuda; did you mean 'cuda'?"},
    {"train.steps=0", "train.steps: must be in [1, 1000000000000], is 0"},
    {"train.steps=5 seed: 6", "expected one value"},
    {"train.steps=5 steps: 6", "is given twice"},
    {"train.steps=5 }", "expected a field name, got '}'"},
    {"train.steps.x=5", "'train.steps' is a value and has no field 'x'"},
    {"train=5", "train is a message; set one of its fields (steps, global_batch"},
    {"train={steps: x}", "train.steps: expected an integer, got 'x'"},
    {"train={steps: 5} {", "train is a message"},
    {"train={steps: 5} model {heads: 3}", "expected a field name, got '}'"},
    {"train={", "train is a message"},
    {"train.schedule.shape=kosine", "unknown value 'kosine'; allowed: constant, cosine"},
    {"model.bias=maybe", "expected true or false, got 'maybe'"},
    {"model.attention=5", "model.attention is a list; set one entry (model.attention.0)"},
    {"model.attention.1={}", "'1' is not an index of model.attention: it has 0 entries"},
    {"model.attention.-1={}", "'-1' is not an index of model.attention"},
    {"model.attention.x={}", "'x' is not an index of model.attention"},
    {"model.attention.00000000000000000000009={}", "is not an index of model.attention"},
    {"model.attention.={}", "'' is not an index of model.attention"},
    {"model.attention.0=5", "model.attention.0 is a message"},
    {"model.attention.0.group.0.haeds=2",
     "unknown field 'haeds' in model.attention.0.group.0; did"},
    {"model.attention.0={group{haeds: 2}}",
     "model.attention.0.group.0.haeds: unknown field 'haeds'"},
    {"model.attention=[{group{haeds: 2}}]",
     "model.attention.0.group.0.haeds: unknown field 'haeds'"},
    {"mesh.tensor=7", "mesh.tensor: 7 does not divide model.feed_forward"},
    {"include=\"x\"", "include belongs in a file"},
    {"include.0=x", "include belongs in a file"},
    {"data.corpus=a\nb", "contains a control character"},
    {"data.corpus=\xff", "is not UTF-8"},
};

TEST(Settings, ErrorsNameTheSetting) {
  for (const BadSetting& bad : kBadSettings) {
    SCOPED_TRACE(bad.setting);
    const std::string what = config_error([&] { set({bad.setting}); });
    EXPECT_THAT(what, testing::StartsWith("--set "));
    EXPECT_THAT(what, HasSubstr(bad.what));
  }
}

// If values do not fit together, the location is the reported value's, which --set may not have
// set.
TEST(Settings, ValuesThatDoNotFitTheFile) {
  EXPECT_EQ(config_error([] { parse("model { channels: 128 }", {"model.heads=3"}); }),
            "text:2:9: model.channels: 128 channels cannot be split among 3 heads; make "
            "model.channels a multiple of model.heads, or set model.head_channels");
  EXPECT_THAT(config_error([] { set({"model.attention.0.group.0.heads=3"}); }),
              HasSubstr("model.attention.0: its groups have 3 heads together, model.heads is 4"));
}

TEST(Settings, TheExactWords) {
  EXPECT_EQ(config_error([] { set({"train.stepz=5"}); }),
            "--set train.stepz=5: unknown field 'stepz' in train; did you mean 'steps'?");
  EXPECT_EQ(config_error([] { set({"train.steps=x"}); }),
            "--set train.steps=x: expected an integer, got 'x'");
  EXPECT_EQ(config_error([] { parse("train { steps: 4 }", {"train.steps=0"}); }),
            "--set train.steps=0: train.steps: must be in [1, 1000000000000], is 0");
}

}  // namespace
}  // namespace birkhoff
