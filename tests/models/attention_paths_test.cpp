// attention_paths() against the paths that runs take, and for every shipped configuration.
#include "models/attention_paths.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>

#include "configs/loader/check.h"
#include "tests/attention/mechanisms/mechanism_cases.h"
#include "tests/models/model_fixture.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;

// As the loader makes it.
Batch batch_of(const configs::Config& config) {
  if (reads_images(config.task()) || config.task().has_point_sets() ||
      config.task().has_translation()) {
    return make_task(config)->synthetic_batch(kVocabulary, at::kCPU);
  }
  Batch batch = make_batch(config.train().global_batch(), config.data().sequence_length());
  if (config.task().has_classification()) {
    batch.fields["lengths"] = at::full({batch.size()}, config.data().sequence_length(), at::kLong);
    batch.fields["labels"] = at::zeros({batch.size()}, at::kLong);
  }
  return batch;
}

const ModelMaker kMaker = [](const configs::Config& config, at::Device device) {
  std::int64_t vocabulary = kVocabulary;
  for (const int cutoff : config.model().adaptive_softmax().cutoff()) vocabulary = cutoff + 1;
  return make_model(config, vocabulary, device);
};

std::vector<std::string> slow_paths(const configs::Config& config) {
  return slow_attention_paths(config, kMaker, batch_of(config));
}

// ---- The configurations of configs/.

std::vector<fs::path> shipped_configs() {
  std::vector<fs::path> paths;
  for (const fs::directory_entry& each : fs::directory_iterator(BIRKHOFF_SOURCE_DIR "/configs")) {
    if (each.path().extension() == ".txtpb") paths.push_back(each.path());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

// On a GPU.
std::map<std::string, std::vector<std::string>> slow_paths_on_gpu() {
  // Heads of 129 channels.
  const std::string copies =
      "because a head has 129 channels: rows are copied, padded to a multiple of 8";
  const auto blocks = [&](const std::string& heads) {
    return heads + " (block_local): block attention takes a slower kernel, " + copies;
  };
  const auto routing = [&](const std::string& heads) {
    return heads + " (routing): attention over gathered rows takes a slower kernel, " + copies;
  };
  const std::string fp32 = "because the dtype is fp32, not bf16 or fp16",
                    of_blocks = "block attention is LibTorch's, " + fp32,
                    of_rows = "attention over gathered rows takes a slower kernel, " + fp32,
                    mixing = "block mixing takes the reference path, " + fp32,
                    half_steps =
                        "(sinkformer): doubly stochastic attention takes the reference "
                        "path, " +
                        fp32,
                    all = "layers 0 to 3, heads 0 to 3 ";
  const std::vector<std::string> sinkhorn{all + "(sinkhorn): " + mixing,
                                          all + "(sinkhorn): " + of_blocks};
  const auto fp32_blocks = [&](const std::string& heads) {
    return heads + " (block_local): block attention takes the reference path, " + fp32;
  };
  const auto fp32_routing = [&](const std::string& heads) {
    return heads + " (routing): " + of_rows;
  };
  const std::vector<std::string> small{fp32_blocks("layers 0 to 5, heads 0 to 3"),
                                       fp32_routing("layers 0 to 5, heads 4 to 7")},
      smoke{fp32_blocks("layers 0 to 1, heads 0 to 1"),
            fp32_routing("layers 0 to 1, heads 2 to 3")};
  const std::string sst2 = "layers 0 to 1, heads 0 to 3 ";
  // The decoder, the encoder and the cross-attention of a model of pairs.
  const std::string pairs[] = {sst2, "encoder " + sst2, "cross-attention of " + sst2};
  const std::string of_padding =
      "(dense): dense attention is LibTorch's, because padding needs a mask of all pairs of tokens: "
      "the dtype is fp32, not bf16 or fp16";
  const std::vector<std::string> dense_pairs{pairs[0] + of_padding, pairs[1] + of_padding,
                                             pairs[2] + of_padding};
  const std::string top_k = "(dense): dense attention takes the reference path, " + fp32,
                    padded_blocks =
                        "(sinkhorn): sorting of blocks takes a slower kernel, because padding "
                        "needs copies of keys and values",
                    layers = "layers 0 to 5, heads 0 to 7 ";
  const auto sinkhorn_of = [&](const std::string& heads) {
    return std::vector<std::string>{
        heads + "(sinkhorn): " + mixing, heads + padded_blocks,
        heads + "(sinkhorn): block attention takes the reference path, " + fp32};
  };
  std::vector<std::string> sinkhorn_pairs = sinkhorn_of(pairs[0]);
  for (const std::string& line : sinkhorn_of(pairs[1])) sinkhorn_pairs.push_back(line);
  sinkhorn_pairs.push_back(pairs[2] + of_padding);
  return {
      {"adaptive_wikitext103_paper", {}},
      {"adaptive_wikitext103_small", {}},
      {"adaptive_wikitext103_smoke", {}},
      {"baby_gpt_dense", {}},
      {"baby_gpt_local", {all + "(block_local): " + of_blocks}},
      {"baby_gpt_moba", {all + "(moba): " + of_rows}},
      {"baby_gpt_routing",
       {"layers 0 to 3, heads 0 to 1 (block_local): " + of_blocks,
        "layers 0 to 3, heads 2 to 3 (routing): " + of_rows}},
      {"baby_gpt_sinkhorn", sinkhorn},
      {"baby_gpt_sparse_transformer", {all + "(sparse_transformer): " + of_rows}},
      {"cats_and_dogs_paper", {}},
      {"cats_and_dogs_small", {"layers 0 to 3, heads 0 to 3 " + half_steps}},
      {"cats_and_dogs_smoke", {"layers 0 to 1, heads 0 to 1 " + half_steps}},
      {"cifar10_pixels_paper", {}},
      {"cifar10_pixels_small", {}},
      {"cifar10_pixels_smoke",
       {"layers 0 to 1, heads 0 to 1 (sinkhorn): " + mixing,
        "layers 0 to 1, heads 0 to 1 (sinkhorn): " + of_blocks}},
      {"imagenet64_pixels_paper", {}},
      {"imagenet64_pixels_small", {}},
      {"imagenet64_pixels_smoke",
       {"layers 0 to 1, head 0 (block_local): " + of_blocks,
        "layers 0 to 1, head 1 (routing): " + of_rows}},
      {"iwslt14_paper", {}},
      {"iwslt14_small", {}},
      {"lmx_base_dense", {}},
      {"lmx_base_sinkhorn", {}},
      {"mnist_patches", {"layer 0, head 0 " + half_steps}},
      {"mnist_pixels", {}},
      {"mnist_pixels_smoke", {}},
      {"mnist_vit", {}},
      {"modelnet40_paper", {}},
      {"modelnet40_pct_paper", {}},
      {"modelnet40_pct_small", {}},
      {"modelnet40_pct_smoke", {}},
      {"modelnet40_small", {"layers 0 to 1, heads 0 to 3 " + half_steps}},
      {"modelnet40_smoke", {"layers 0 to 1, heads 0 to 3 " + half_steps}},
      {"multi30k_dense", dense_pairs},
      {"multi30k_sinkformer",
       {pairs[0] + of_padding, pairs[1] + half_steps, pairs[2] + of_padding}},
      {"multi30k_sinkhorn",
       {pairs[0] + of_padding, pairs[1] + "(sinkhorn): " + mixing,
        pairs[1] + "(sinkhorn): sorting of blocks takes a slower kernel, because padding needs "
                   "copies of keys and values",
        pairs[1] + "(sinkhorn): block attention takes the reference path, " + fp32,
        pairs[2] + of_padding}},
      {"multi30k_topk", {pairs[0] + top_k, pairs[1] + top_k, pairs[2] + top_k}},
      {"quickstart", sinkhorn},
      {"routing_enwik8_paper", {}},
      {"routing_enwik8_small", small},
      {"routing_enwik8_smoke", smoke},
      {"routing_pg19_paper",
       {blocks("layers 0 to 20, heads 0 to 7"), blocks("layer 21, heads 0 to 5"),
        routing("layer 21, heads 6 to 7")}},
      {"routing_pg19_small",
       {fp32_blocks("layers 0 to 4, heads 0 to 7"), fp32_blocks("layer 5, heads 0 to 5"),
        fp32_routing("layer 5, heads 6 to 7")}},
      {"routing_pg19_smoke",
       {fp32_blocks("layer 0, heads 0 to 3"), fp32_blocks("layer 1, heads 0 to 2"),
        fp32_routing("layer 1, head 3")}},
      {"routing_wikitext103_paper", {}},
      {"routing_wikitext103_small", small},
      {"routing_wikitext103_smoke", smoke},
      {"sst2_dense", {sst2 + of_padding}},
      {"sst2_sinkformer", {sst2 + half_steps}},
      {"sst2_sinkhorn",
       {sst2 + "(sinkhorn): " + mixing,
        sst2 + "(sinkhorn): sorting of blocks takes a slower kernel, because padding needs copies "
               "of keys and values",
        sst2 + "(sinkhorn): block attention takes the reference path, " + fp32}},
      {"sort_dense_smoke", dense_pairs},
      {"sort_paper", {}},
      {"sort_sinkhorn_smoke", sinkhorn_pairs},
      {"sst2_sortcut",
       {sst2 + "(sortcut): sorting of blocks takes a slower kernel, because padding needs copies "
               "of keys and values",
        sst2 + "(sortcut): block attention takes the reference path, " + fp32}},
      {"text_pairs_smoke", {sst2 + of_padding}},
      {"xl_enwik8_paper", {}},
      {"xl_enwik8_small", {}},
      {"xl_enwik8_smoke", {sst2 + top_k}},
  };
}

TEST(AttentionPaths, ShippedConfigurationsOnAGpu) {
  std::map<std::string, std::vector<std::string>> found;
  for (const fs::path& path : shipped_configs()) {
    found[path.stem()] = slow_paths(load_config(path.string(), {"device=cuda"}));
  }
  const auto expected = slow_paths_on_gpu();
  EXPECT_EQ(found.size(), expected.size());
  for (const auto& [name, lines] : found) {
    ASSERT_TRUE(expected.contains(name)) << name;
    EXPECT_EQ(lines, expected.at(name)) << name;
  }
}

TEST(AttentionPaths, ShippedConfigurationsAreFusedOnACpu) {
  for (const fs::path& path : shipped_configs()) {
    EXPECT_EQ(slow_paths(load_config(path.string(), {"device=cpu"})), std::vector<std::string>())
        << path;
  }
}

// ---- What makes attention slow on a GPU.

struct SlowCase {
  std::string mechanism;
  std::vector<std::string> settings;
  std::vector<std::string> lines;  // after "layers 0 to 2, heads 0 to 3 (..): "
};

void expect_lines(const std::string& task, const std::vector<SlowCase>& cases) {
  for (const SlowCase& each : cases) {
    SCOPED_TRACE(each.mechanism);
    std::vector<std::string> settings{"device=cuda", "train.precision=bf16",
                                      "train.global_batch=2"};
    settings.insert(settings.end(), each.settings.begin(), each.settings.end());
    const configs::Config config =
        parse_config("task { " + task +
                         " } data { corpus: 'none' sequence_length: 256 } model { layers: 3 "
                         "channels: 128 heads: 4 attention { group { mechanism { " +
                         each.mechanism + " } } } }",
                     "test", settings);
    const std::string mechanism = each.mechanism.substr(0, each.mechanism.find(' '));
    std::vector<std::string> lines;
    for (const std::string& line : each.lines) {
      lines.push_back("layers 0 to 2, heads 0 to 3 (" + mechanism + "): " + line);
    }
    EXPECT_EQ(slow_paths(config), lines);
  }
}

TEST(AttentionPaths, ReasonsOnAGpu) {
  const std::string reference = "takes the reference path, because ",
                    copies =
                        " takes a slower kernel, because a head has 36 channels: rows are "
                        "copied, padded to a multiple of 8",
                    balances = "doubly stochastic attention " + reference;
  expect_lines(
      "language_model {}",
      {{"dense {}", {}, {}},
       {"dense { dropout: 0.1 }", {}, {}},
       {"dense { dropout: 0.1 }",
        {"data.restart_at_documents=true"},
        {"dense attention takes a slower kernel, because dropout with documents needs a mask of "
         "all pairs of tokens"}},
       {"dense { dropout: 0.1 }",
        {"train.precision=fp32"},
        {"dense attention " + reference + "the dtype is fp32, not bf16 or fp16"}},
       {"dense {} sink: true", {}, {}},
       {"dense {} sink: true",
        {"train.precision=fp32"},
        {"dense attention " + reference + "the dtype is fp32, not bf16 or fp16"}},
       {"dense {}", {"data.restart_at_documents=true"}, {}},
       {"dense {}",
        {"data.restart_at_documents=true", "train.precision=fp32"},
        {"dense attention is LibTorch's, because documents need a mask of all pairs of tokens: the "
         "dtype is fp32, not bf16 or fp16"}},
       {"dense {}", {"model.positions=relative_sinusoidal"}, {}},
       {"dense {}",
        {"model.positions=relative_sinusoidal", "model.channels=144"},
        {"attention over gathered rows" + copies}},
       {"dense {}",
        {"model.positions=relative_sinusoidal", "train.precision=fp32"},
        {"attention over gathered rows takes a slower kernel, because the dtype is fp32, not bf16 "
         "or fp16"}},
       {"dense { normalizer: top_k }", {}, {}},
       {"dense { normalizer: entmax }", {}, {}},
       {"dense { normalizer: entmax dropout: 0.1 }",
        {},
        {"dense attention " + reference + "sparse normalizers with dropout have no GPU kernel"}},
       {"dense { normalizer: top_k }",
        {"train.precision=fp32"},
        {"dense attention " + reference + "the dtype is fp32, not bf16 or fp16"}},
       {"dense { normalizer: top_k kept_keys: 65 }",
        {},
        {"dense attention " + reference + "a query keeps 65 keys, more than 64"}},
       {"block_local { block: 64 dropout: 0.1 } sink: true", {}, {}},
       {"block_local { block: 8 }",
        {},
        {"block attention is LibTorch's, because a block has 8 tokens, fewer than 16"}},
       {"block_local { block: 64 dropout: 0.1 }",
        {"model.channels=144"},
        {"block attention" + copies}},
       {"sliding_window { width: 40 } relative_positions { max_distance: 9 values: false }",
        {},
        {}},
       {"sliding_window { width: 40 } relative_positions { max_distance: 9 }", {}, {}},
       {"routing { clusters: 4 }", {}, {}},
       {"routing { clusters: 4 dropout: 0.1 } relative_positions { max_distance: 9 }", {}, {}},
       {"routing { clusters: 4 }",
        {"model.channels=144"},
        {"attention over gathered rows" + copies}},
       {"moba { block: 2 top_blocks: 66 }",
        {},
        {"choice of blocks " + reference + "a query chooses 65 blocks, more than 64"}},
       {"sparse_transformer { stride: 64 }", {}, {}},
       {"sparse_transformer { stride: 64 pattern: strided dropout: 0.1 }", {}, {}},
       {"sinkhorn { block: 64 }", {}, {}},
       {"sinkhorn { block: 64 causal_balance: cumulative }", {}, {}},
       {"sinkhorn { block: 64 causal_balance: cumulative iterations: 21 }",
        {},
        {"balance " + reference + "there are 21 iterations, more than 20"}},
       {"sinkhorn { block: 64 top_m: 2 }", {}, {}},
       {"sinkhorn { block: 16 top_m: 2 }",
        {"data.sequence_length=1040"},
        {"mixing of few sources takes a slower kernel, because those of GPUs multiply every block, "
         "most of them by 0"}}});
  expect_lines("classification { classes: 2 }",
               {{"sinkhorn { block: 16 }",
                 {"data.sequence_length=8224"},
                 {"balance " + reference + "there are 514 blocks, more than 256",
                  "block mixing " + reference + "there are 514 blocks, more than 512",
                  "sorting of blocks takes a slower kernel, because padding needs copies of keys "
                  "and values"}},
                {"sinkhorn { block: 64 }", {}, {}},
                {"sortcut { sinkhorn { block: 64 } local: true }",
                 {},
                 {"sorting of blocks takes a slower kernel, because padding needs copies of keys "
                  "and values"}},
                {"sinkformer { half_steps: 3 }", {}, {}},
                {"sinkformer { half_steps: 3 gradient: implicit }",
                 {},
                 {balances + "the implicit gradient has no GPU kernel"}},
                {"sinkformer { half_steps: 3 dropout: 0.1 }",
                 {},
                 {balances + "attention dropout has no such kernel"}}});
}

TEST(AttentionPaths, LayersWithOneAnswerShareALine) {
  const configs::Config config = parse_config(
      "task { language_model {} } data { corpus: 'none' sequence_length: 64 } device: cuda "
      "model { layers: 7 channels: 64 heads: 4 "
      "attention { group { mechanism { dense { normalizer: entmax dropout: 0.1 } } } } "
      "attention { group { heads: 3 mechanism { block_local { block: 8 } } } "
      "            group { mechanism { dense { normalizer: entmax dropout: 0.1 } } } } "
      "attention { group { mechanism { dense {} } } } } "
      "train { precision: bf16 global_batch: 4 micro_batch: 2 recompute: true }",
      "test", {});
  const std::string dropout =
      "(dense): dense attention takes the reference path, because sparse normalizers with dropout "
      "have no GPU kernel";
  EXPECT_THAT(slow_paths(config),
              ElementsAre("layers 0, 3, 6, heads 0 to 3 " + dropout,
                          "layers 1, 4, heads 0 to 2 (block_local): block attention is LibTorch's, "
                          "because a block has 8 tokens, fewer than 16",
                          "layers 1, 4, head 3 " + dropout));
}

// ---- A run takes the paths of attention_paths().

std::vector<std::string> texts_of(const std::vector<PathTaken>& all) {
  std::vector<std::string> texts;
  for (const PathTaken& each : all) {
    texts.push_back(fmt::format("{}: {} {} \"{}\"", each.caller, each.operation,
                                static_cast<int>(each.path), each.why));
  }
  std::sort(texts.begin(), texts.end());
  return texts;
}

// Of a step that runs on the CPU.
std::vector<PathTaken> paths_of_run(const configs::Config& config, const Batch& batch) {
  const auto model = make_model(config, kVocabulary, at::kCPU);
  const PathRecord record;
  model->loss_sums(batch, make_noise(batch));
  return record.taken();
}

class ToldPath : public ::testing::TestWithParam<test::MechanismCase> {};
INSTANTIATE_TEST_SUITE_P(Mechanisms, ToldPath, ::testing::ValuesIn(test::all_cases()),
                         test::name_of);

TEST_P(ToldPath, IsTheOneTaken) {
  const std::string task =
      GetParam().causal ? "language_model {}" : "classification { classes: 3 }";
  for (const char* const precision : {"fp64", "fp32", "bf16", "fp16"}) {
    SCOPED_TRACE(precision);
    const configs::Config config =
        parse_config("task { " + task +
                         " } data { corpus: 'none' sequence_length: 64 } model { layers: 1 "
                         "channels: 16 heads: 2 attention { group { mechanism { " +
                         test::with_noise(GetParam().config).ShortDebugString() + " } } } }",
                     "test", {std::string("train.precision=") + precision, "train.global_batch=2"});
    const Batch batch = batch_of(config);
    const std::vector<PathTaken> taken = paths_of_run(config, batch);
    EXPECT_FALSE(taken.empty());
    EXPECT_EQ(texts_of(taken), texts_of(attention_paths(config, kMaker, batch)));
    // fp16 has no kernels on the CPU.
    const bool slow = std::any_of(taken.begin(), taken.end(), [](const PathTaken& each) {
      return each.path != Path::kFused && !each.why.empty();
    });
    EXPECT_TRUE(slow || precision != std::string("fp16"));
  }
}

}  // namespace
}  // namespace birkhoff
