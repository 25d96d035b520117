// Texts with one mistake each: the location, the field and the words of the error.
#include <gmock/gmock.h>
#include <google/protobuf/descriptor.pb.h>

#include <chrono>

#include "configs/loader/text_parser.h"
#include "helpers.h"

namespace birkhoff {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

struct Malformed {
  const char* text;   // after a first line that chooses the task
  const char* place;  // line:column, and the field if there is one
  const char* words;
};

const Malformed kMalformed[] = {
    // Names.
    {"train { schedule { lerning_rate: 1 } }", "2:20: train.schedule.lerning_rate",
     "unknown field 'lerning_rate' in birkhoff.configs.Schedule; did you mean 'learning_rate'?"},
    {"train {\n  schedule {\n    lerning_rate: 1\n  }\n}", "4:5: train.schedule.lerning_rate",
     "did you mean 'learning_rate'?"},
    {"\ttrian {}", "2:9: trian", "did you mean 'train'?"},
    {"foo: 1", "2:1: foo", "its fields are include, task, data, model, train, checkpoint, mesh"},
    {"sequence_length: 5", "2:1: sequence_length", "did you mean data.sequence_length?"},
    {"learning_rate: 5", "2:1: learning_rate", "did you mean train.schedule.learning_rate?"},
    {"model { attention { group { heads: 2 } group { haeds: 2 } } }",
     "2:48: model.attention.0.group.1.haeds", "did you mean 'heads'?"},
    {"model { attention {} attention { gruop {} } }", "2:34: model.attention.1.gruop",
     "did you mean 'group'?"},
    {"model { attention: [{ group: [{ heads: 1 }, { hedas: 3 }] }] }",
     "2:47: model.attention.0.group.1.hedas", "did you mean 'heads'?"},
    {"Train { steps: 5 }", "2:1: Train", "did you mean 'train'?"},
    {"model { attention { group { mechanism { performer {} } } } }",
     "2:41: model.attention.0.group.0.mechanism.performer",
     "its fields are dense, block_local, sinkhorn, sinkhorn_mixture"},
    {"train { steps: 5 } # steps\nmodel { chanels: 3 }", "3:9: model.chanels", "'channels'"},
    {"train.steps: 5", "2:6", "expected '{', got '.'"},
    {"[foo.bar]: 1", "2:10", "extension \"foo.bar\" is not defined"},
    {"[birkhoff.configs.fixed]: true", "2:25", "is not defined or is not an extension"},
    {"5: 1", "2:1", "expected a field name, got '5'"},
    {"\"train\" { steps: 5 }", "2:1", "expected a field name, got '\"train\"'"},
    // Structure.
    {"train {", "2:8: train", "expected a field name or '}', got the end of the text"},
    {"train { # }", "2:12: train", "got the end of the text"},
    {"train {}}", "2:9", "expected a field name, got '}'"},
    {"train", "2:6: train", "expected '{', got the end of the text"},
    {"train: 5", "2:8: train", "expected '{', got '5'"},
    {"train: {steps: 5>", "2:17: train", "expected \"}\", found \">\""},
    {"train: [{ steps: 5 }]", "2:8: train", "expected '{', got '['"},
    {"train { steps 5 }", "2:15: train.steps", "expected ':' and a value, got '5'"},
    {"train { steps = 5 }", "2:15: train.steps", "expected ':' and a value, got '='"},
    {"train { steps: 5 @ }", "2:18: train", "got '@'"},
    {"train { steps: [1, 2] }", "2:16: train.steps", "expected an integer, got '['"},
    {"model { attention: [{}, }", "2:25: model.attention", "expected '{', got '}'"},
    {"model { attention: [{} {}] }", "2:24: model.attention", "expected \",\", found \"{\""},
    {"/* comment */", "2:1", "expected a field name, got '/'"},
    {"// comment", "2:1", "expected a field name, got '/'"},
    {"train { steps: 5 }\ntrain { seed: 6 }", "3:1: train", "is given twice; keep one"},
    {"train { steps: 5 steps: 6 }", "2:18: train.steps", "is given twice; keep one"},
    {"train { steps: 5, steps: 5 }", "2:19: train.steps", "is given twice; keep one"},
    {"train { optimizer { adamw {} adafactor {} } }", "2:30: train.optimizer.adafactor",
     "a second choice where only one is allowed; keep one of adamw, adafactor"},
    {"model { attention { group { mechanism { dense {} sinkhorn {} } } } }",
     "2:50: model.attention.0.group.0.mechanism.sinkhorn", "keep one of dense, block_local"},
    {"include: \"base.txtpb\"", "2:1: include.0", "not a file cannot include"},
    // Types.
    {"train { steps: abc }", "2:16: train.steps", "expected an integer, got 'abc'"},
    {"train { steps: 1.5 }", "2:16: train.steps", "expected an integer, got '1.5'"},
    {"train { steps: 1e3 }", "2:16: train.steps", "expected an integer, got '1e3'; write 1000"},
    {"train { steps: \"5\" }", "2:16: train.steps", "expected an integer, got '\"5\"'"},
    {"train { steps: true }", "2:16: train.steps", "expected an integer, got 'true'"},
    {"train { steps: {} }", "2:16: train.steps", "expected an integer, got '{'"},
    {"train { steps: }", "2:16: train.steps", "expected an integer, got '}'"},
    {"train { steps: --1 }", "2:17: train.steps", "expected an integer, got '-'"},
    {"train { seed: -1 }", "2:15: train.seed", "expected an integer of at least 0, got '-'"},
    {"train { steps: 0x }", "2:16: train.steps", "is hexadecimal"},
    {"train { steps: 0x10 }", "2:16: train.steps",
     "'0x10' is hexadecimal; write it as a decimal number"},
    {"train { steps: 09 }", "2:16: train.steps", "'09' starts with a zero"},
    {"model { layers: 010 }", "2:17: model.layers", "'010' starts with a zero"},
    {"train { schedule { warmup_steps: -010 } }", "2:35: train.schedule.warmup_steps", "'010'"},
    {"train { clip_norm: 00.5 }", "2:20: train.clip_norm", "'00' starts with a zero"},
    {"device: gpu", "2:9: device", "allowed: cpu, cuda; did you mean 'cuda'?"},
    {"train { precision: float16 }", "2:20: train.precision", "did you mean 'fp16'?"},
    {"train { seed: 18446744073709551616 }", "2:15: train.seed", "does not fit uint64"},
    {"train { steps: 9223372036854775808 }", "2:16: train.steps", "does not fit int64"},
    {"train { steps: -9223372036854775809 }", "2:17: train.steps", "(with its minus sign)"},
    {"train { global_batch: 2147483648 }", "2:23: train.global_batch", "does not fit int32"},
    {"train { clip_norm: abc }", "2:20: train.clip_norm", "expected a number, got 'abc'"},
    {"train { clip_norm: \"1\" }", "2:20: train.clip_norm", "expected a number, got '\"1\"'"},
    {"train { clip_norm: -x }", "2:21: train.clip_norm", "expected a number, got 'x'"},
    {"model { bias: maybe }", "2:15: model.bias", "expected true or false, got 'maybe'"},
    {"model { bias: yes }", "2:15: model.bias", "expected true or false, got 'yes'"},
    {"model { bias: 2 }", "2:15: model.bias", "'2' does not fit bool"},
    {"model { bias: \"true\" }", "2:15: model.bias", "expected true or false, got '\"true\"'"},
    {"model { positions: leaned }", "2:20: model.positions",
     "unknown value 'leaned'; allowed: learned, sinusoidal, no_positions, image_axes, relative_sinusoidal; did you mean "
     "'learned'?"},
    {"model { positions: 17 }", "2:20: model.positions", "unknown value '17'; allowed: learned"},
    {"model { positions: \"learned\" }", "2:20: model.positions", "expected one of learned"},
    {"train { schedule { shape: linear } }", "2:27: train.schedule.shape",
     "unknown value 'linear'; allowed: constant, cosine, rsqrt, rsqrt_decay"},
    {"data { corpus: shakespeare }", "2:16: data.corpus",
     "expected a string in quotes, got 'shakespeare'"},
    {"data { corpus: 5 }", "2:16: data.corpus", "expected a string in quotes, got '5'"},
    {"data { corpus: \"open }", "2:23: data", "unexpected end of string"},
    {"data { corpus: \"a\\qb\" }", "2:19: data.corpus", "invalid escape sequence"},
    {"data { corpus: \"a\\nb\" }", "2:8: data.corpus", "'a\\x0ab' contains a control character"},
    {"data { corpus: \"\\377\" }", "2:8: data.corpus", "is not UTF-8"},
    // Ranges.
    {"train { steps: 0 }", "2:9: train.steps", "must be in [1, 1000000000000], is 0"},
    {"train { steps: -5 }", "2:9: train.steps", "is -5"},
    {"train { global_batch: 0 }", "2:9: train.global_batch", "must be in [1, 4194304], is 0"},
    {"train { micro_batch: -1 }", "2:9: train.micro_batch", "is -1"},
    {"train { clip_norm: -0.5 }", "2:9: train.clip_norm", "must be in [0, inf), is -0.5"},
    {"train { clip_norm: nan }", "2:9: train.clip_norm", "is nan"},
    {"train { clip_norm: inf }", "2:9: train.clip_norm", "is inf"},
    {"train { schedule { learning_rate: 1e999 } }", "2:20: train.schedule.learning_rate", "is inf"},
    {"train { schedule { learning_rate: -inf } }", "2:20: train.schedule.learning_rate", "is -inf"},
    {"train { schedule { warmup_steps: -1 } }", "2:20: train.schedule.warmup_steps", "is -1"},
    {"train { max_skipped: 0 }", "2:9: train.max_skipped", "is 0"},
    {"train { bucket_elements: 0 }", "2:9: train.bucket_elements", "is 0"},
    {"train { optimizer { adamw { beta1: 1 } } }", "2:29: train.optimizer.adamw.beta1",
     "must be in [0, 1), is 1"},
    {"train { optimizer { adamw { epsilon: 0 } } }", "2:29: train.optimizer.adamw.epsilon", "is 0"},
    {"train { optimizer { adafactor { decay_exponent: 2 } } }",
     "2:33: train.optimizer.adafactor.decay_exponent", "must be in (0, 1], is 2"},
    {"data { sequence_length: 0 }", "2:8: data.sequence_length", "is 0"},
    {"data { sequence_length: 2000000000 }", "2:8: data.sequence_length", "[1, 1048576]"},
    {"data { prefetch: 0 }", "2:8: data.prefetch", "is 0"},
    {"model { layers: 0 }", "2:9: model.layers", "is 0"},
    {"model { heads: 0 }", "2:9: model.heads", "is 0"},
    {"model { heads: -4 }", "2:9: model.heads", "is -4"},
    {"model { channels: 0 }", "2:9: model.channels", "is 0"},
    {"model { feed_forward: -1 }", "2:9: model.feed_forward", "is -1"},
    {"model { dropout { residual: 1 } }", "2:19: model.dropout.residual",
     "must be in [0, 1), is 1"},
    {"model { norm_epsilon: 0 }", "2:9: model.norm_epsilon", "is 0"},
    {"model { attention { group { mechanism { dense { dropout: 1.5 } } } } }",
     "2:49: model.attention.0.group.0.mechanism.dense.dropout", "is 1.5"},
    {"model { attention { group { mechanism { block_local { look_back: 2 } } } } }",
     "2:55: model.attention.0.group.0.mechanism.block_local.look_back", "must be in [0, 1], is 2"},
    {"model { attention { group { mechanism { sinkhorn { temperature: 0 } } } } }",
     "2:52: model.attention.0.group.0.mechanism.sinkhorn.temperature", "is 0"},
    {"model { attention { group { mechanism { sinkhorn { iterations: -1 } } } } }",
     "2:52: model.attention.0.group.0.mechanism.sinkhorn.iterations", "is -1"},
    {"model { attention { group { mechanism { sinkhorn { block: 0 } } } } }",
     "2:52: model.attention.0.group.0.mechanism.sinkhorn.block", "is 0"},
    {"checkpoint { keep: 0 }", "2:14: checkpoint.keep", "is 0"},
    {"checkpoint { every: -1 }", "2:14: checkpoint.every", "is -1"},
    {"evaluate { micro_batch: 0 }", "2:12: evaluate.micro_batch", "is 0"},
    {"metrics { every: 0 }", "2:11: metrics.every", "is 0"},
    {"mesh { data: -1 }", "2:8: mesh.data", "is -1"},
    {"model { attention { group { mechanism { sinkformer { half_steps: 4 } } } } }",
     "2:54: model.attention.0.group.0.mechanism.sinkformer.half_steps",
     "must be in [1, 999], odd, is 4"},
    // Values that do not fit together.
    {"model { attention { group { mechanism { sinkformer {} } } } }",
     "2:41: model.attention.0.group.0.mechanism.sinkformer",
     "is for encoders, not for causal attention, because column sums include later queries"},
    {"model { attention { group { mechanism { sortcut {} } } } }",
     "2:41: model.attention.0.group.0.mechanism.sortcut",
     "is for encoders, not for causal attention, because every query sees sorted blocks"},
    {"model { channels: 130 }", "2:9: model.channels",
     "130 channels cannot be split among 4 heads"},
    {"model { heads: 3 }", "2:1: model.channels", "128 channels cannot be split among 3 heads"},
    {"model { heads: 4 attention { group { key_heads: 3 } } }",
     "2:38: model.attention.0.group.0.key_heads", "3 does not divide the group's 4 heads"},
    {"model { channels: 5 heads: 5 positions: sinusoidal }", "2:9: model.channels", "even number"},
    {"model { attention { group { heads: 1 } } }", "2:9: model.attention.0",
     "its groups have 1 head together, model.heads is 4"},
    {"model { attention { group { heads: 3 } group { heads: 2 } } }", "2:9: model.attention.0",
     "have 5 heads together"},
    {"model { attention { group { heads: 4 } group {} } }", "2:40: model.attention.0.group.1.heads",
     "no heads are left"},
    {"model { attention { group {} group {} } }", "2:21: model.attention.0.group.0.heads",
     "no heads are left"},
    {"model { attention { group { mechanism { sinkhorn { block: 24 } } } } }",
     "2:52: model.attention.0.group.0.mechanism.sinkhorn.block",
     "data.sequence_length 256 is not a multiple of the block length 24"},
    {"model { attention { group { mechanism { block_local { block: 512 } } } } }",
     "2:55: model.attention.0.group.0.mechanism.block_local.block", "is not a multiple"},
    {"model { attention { group { mechanism { sinkhorn { max_blocks: 15 } } } } }",
     "2:52: model.attention.0.group.0.mechanism.sinkhorn.max_blocks",
     "15 is less than the 16 blocks of a sequence"},
    {"model { attention { group { mechanism { sinkhorn_mixture { sinkhorn { block: 7 } } } } } }",
     "2:71: model.attention.0.group.0.mechanism.sinkhorn_mixture.sinkhorn.block", "block length 7"},
    {"data { sequence_length: 4112 }\nmodel { attention { group { mechanism { sinkhorn {} } } } }",
     "3:41: model.attention.0.group.0.mechanism.sinkhorn.causal_balance",
     "prefix supports at most 256 blocks, but a sequence has 257"},
    {"train { global_batch: 4 micro_batch: 5 }", "2:25: train.micro_batch",
     "5 sequences are more than train.global_batch 4"},
    {"train { schedule { learning_rate: 1e-5 } }", "2:9: train.schedule.final_learning_rate",
     "0.0001 is above the peak, train.schedule.learning_rate 1e-05"},
    {"train { schedule { shape: rsqrt warmup_steps: 0 } }", "2:33: train.schedule.warmup_steps",
     "must be at least 1 with shape rsqrt"},
    {"train { schedule { shape: rsqrt_decay warmup_steps: 0 } }",
     "2:39: train.schedule.warmup_steps", "shape rsqrt_decay"},
    {"mesh { tensor: 7 }", "2:8: mesh.tensor", "7 does not divide model.feed_forward"},
    {"mesh { tensor: 2 } model { heads: 3 channels: 12 feed_forward: 48 }", "2:8: mesh.tensor",
     "2 does not divide model.attention.0.group.0.heads 3"},
    {"mesh { tensor: 2 } model { heads: 4 attention { group { key_heads: 1 mechanism { dense {} } } "
     "} }",
     "2:8: mesh.tensor", "2 does not divide model.attention.0.group.0.key_heads 1"},
    {"mesh { tensor: 2 } train { optimizer { adafactor {} } }", "2:8: mesh.tensor",
     "must be 1 with train.optimizer.adafactor"},
    {"mesh { tensor: 2 } train { precision: fp16 }", "2:8: mesh.tensor",
     "must be 1 with train.precision: fp16"},
    {"device: cuda mesh { tensor: 2 } train { cuda_graph: true }", "2:21: mesh.tensor",
     "must be 1 with train.cuda_graph"},
    {"mesh { sequence: 2 }", "2:8: mesh.sequence", "not supported yet"},
    {"train { invariant { shards: 4 } } mesh { ranks_per_node: 2 }", "2:42: mesh.ranks_per_node",
     "must be 0 with train.invariant.shards"},
    {"mesh { ranks_per_node: 2 zero_inside_nodes: true }", "2:26: mesh.zero_inside_nodes",
     "has no effect with train.zero_stage 0"},
    {"mesh { ranks_per_node: 1 zero_inside_nodes: true } train { zero_stage: 3 }",
     "2:26: mesh.zero_inside_nodes", "would slice over one rank"},
    {"mesh { nccl_reductions: true }", "2:8: mesh.nccl_reductions", "needs device: cuda"},
    {"device: cuda mesh { nccl_reductions: true } train { invariant { shards: 4 } }",
     "2:21: mesh.nccl_reductions", "must be false with train.invariant.shards"},
    {"device: cuda mesh { nccl_reductions: true ranks_per_node: 2 }", "2:21: mesh.nccl_reductions",
     "must be false with mesh.ranks_per_node"},
    {"device: cuda train { zero_stage: 2 cuda_graph: true }", "2:36: train.cuda_graph",
     "must be false with train.zero_stage 2"},
    {"evaluate { split: \"train\" }", "2:12: evaluate.split", "must be \"valid\" or \"test\""},
};

TEST(Malformed, EachNamesPlaceFieldAndCause) {
  for (const Malformed& example : kMalformed) {
    SCOPED_TRACE(example.text);
    const std::string what = config_error([&] { parse(example.text); });
    EXPECT_THAT(what, StartsWith("text:" + std::string(example.place) + ": "));
    EXPECT_THAT(what, HasSubstr(example.words));
  }
  EXPECT_GE(std::size(kMalformed), 80u);
}

TEST(Malformed, TaskIsMissing) {
  for (const char* text : {"", "task {}", "train { steps: 5 }"}) {
    EXPECT_THAT(config_error([&] { parse_config(text, "text", {}); }),
                HasSubstr("task: no task is chosen; choose what to learn, for instance task { "
                          "language_model {} } (or language_model, translation, classification, "
                          "pixel_model, image_classification, point_sets)"));
  }
}

TEST(Malformed, BytesThatAreNotText) {
  for (const std::string bad :
       {"\xff", "\xc0\xaf", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xe2\x82", "\x80"}) {
    EXPECT_THAT(config_error([&] { parse("# a\n# " + bad); }), StartsWith("text:3:3: byte 0x"));
  }
  EXPECT_THAT(config_error([&] { parse(std::string("#\0", 2)); }),
              StartsWith("text:2:2: byte 0x00 is not UTF-8 text"));
  EXPECT_THAT(config_error([&] { parse("train { \x01 }"); }),
              StartsWith("text:2:9: train: invalid control characters"));
  EXPECT_NO_THROW(parse("# gr\xc3\xbc\xc3\x9f \xe2\x82\xac \xf0\x9f\x98\x80"));
}

TEST(Malformed, LongValuesAreCut) {
  const std::string what =
      config_error([] { parse("model { positions: " + std::string(100000, 'x') + " }"); });
  EXPECT_THAT(what, HasSubstr("unknown value 'xxx"));
  EXPECT_LT(what.size(), 300u);
}

TEST(Malformed, TextsThatAreTooLarge) {
  EXPECT_THAT(config_error([] { parse(std::string(kMaxTextBytes, ' ')); }),
              HasSubstr("bytes of text; at most 4194304 are allowed"));
}

TEST(Malformed, NestingBombs) {
  const auto start = std::chrono::steady_clock::now();
  std::string unknown, recursive;
  for (int i = 0; i < 5000; ++i) {
    unknown += "a{";
    recursive += "nested_type{";
  }
  EXPECT_THAT(config_error([&] { parse(unknown); }), StartsWith("text:2:1: a: unknown field 'a'"));
  EXPECT_THAT(config_error([&] { parse("model{attention:" + std::string(5000, '[')); }),
              StartsWith("text:2:18: model.attention: expected '{', got '['"));
  // Our schema has no recursive message; the limit protects future ones.
  google::protobuf::DescriptorProto message;
  const auto error = parse_text(recursive, message);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->what, "nested deeper than 100 levels");
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(2));
}

TEST(NearestName, IsNearOrNothing) {
  EXPECT_EQ(nearest_name("stepz", {"seed", "steps"}), "steps");
  EXPECT_EQ(nearest_name("tsak", {"task", "mesh"}), "task");
  EXPECT_EQ(nearest_name("AdamW", {"adafactor", "adamw"}), "adamw");
  EXPECT_EQ(nearest_name("gradient", {"task", "mesh"}), "");
  EXPECT_EQ(nearest_name("", {"a"}), "");
  EXPECT_EQ(nearest_name("x", {"a"}), "");
  EXPECT_EQ(nearest_name("steps", {}), "");
}

TEST(Malformed, AByteOrderMarkIsNoError) {
  EXPECT_EQ(parse_config("\xef\xbb\xbf" + std::string(kTask) + "train { steps: 7 }", "text", {})
                .train()
                .steps(),
            7);
}

}  // namespace
}  // namespace birkhoff
