#include "models/attention_paths.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "attention/kernels/common/path.h"
#include "configs/loader/message_text.h"
#include "models/meta_operations.h"

namespace birkhoff {
namespace {

std::string range_text(std::int64_t first, std::int64_t last) {
  return first == last ? fmt::format("{}", first) : fmt::format("{} to {}", first, last);
}

// "layers 0 to 3, 5", from ascending numbers.
std::string layers_text(const std::vector<std::int64_t>& layers) {
  std::vector<std::string> ranges;
  for (std::size_t begin = 0, end = 0; begin < layers.size(); begin = end) {
    for (end = begin + 1; end < layers.size() && layers[end] == layers[end - 1] + 1;) ++end;
    ranges.push_back(range_text(layers[begin], layers[end - 1]));
  }
  return fmt::format("{} {}", layers.size() == 1 ? "layer" : "layers", fmt::join(ranges, ", "));
}

using Attentions = google::protobuf::RepeatedPtrField<configs::Attention>;

// The attention of a stack's layers, which have the entries in turn.
struct LayerList {
  const Attentions& entries;
  int layers;
  std::string before, after;  // of a layer's number in the name of a caller
  std::string what;           // of messages: "", "encoder "
};

std::vector<LayerList> layer_lists(const configs::Model& model) {
  std::vector<LayerList> lists{
      {model.attention(), model.layers(), "blocks.", ".attention.groups.", ""}};
  if (!model.has_encoder()) return lists;
  const configs::Encoder& encoder = model.encoder();
  lists.push_back(
      {encoder.attention(), encoder.layers(), "encoder.blocks.", ".attention.groups.", "encoder "});
  lists.push_back({encoder.cross_attention(), model.layers(), "blocks.", ".cross_attention.groups.",
                   "cross-attention of "});
  return lists;
}

// For each operation of an entry that is slower than it could be, "heads 0 to 3 (routing):
// attention over gathered rows takes the reference path, because ..".
std::vector<std::string> lines_of(const LayerList& list, int entry,
                                  const std::vector<PathTaken>& all) {
  std::vector<std::string> lines;
  std::int64_t first = 0;
  for (int g = 0; g < list.entries[entry].group_size(); ++g) {
    const configs::HeadGroup& group = list.entries[entry].group(g);
    const std::int64_t last = first + group.heads() - 1;
    // The first layers have the entries in turn. Callers are called as their parameters.
    const std::string caller = fmt::format("{}{}{}{}", list.before, entry, list.after, g);
    for (const PathTaken& taken : all) {
      if (taken.why.empty() || taken.caller != caller) continue;
      lines.push_back(fmt::format("{} {} ({}): {}", first == last ? "head" : "heads",
                                  range_text(first, last), chosen_member(group.mechanism())->name(),
                                  describe(taken)));
    }
    first = last + 1;
  }
  return lines;
}

}  // namespace

std::vector<PathTaken> attention_paths(const configs::Config& config, const ModelMaker& make,
                                       Batch batch) {
  const MetaOperations operations;
  const at::NoGradGuard no_gradients;
  const std::unique_ptr<Model> model = make(config, at::kMeta);
  if (config.data().restart_at_documents()) {
    const at::Tensor tokens_BT = batch.at(field::kInputs);
    batch.fields[std::string(field::kSegments)] = at::empty(tokens_BT.sizes(), at::kInt);
    batch.fields[std::string(field::kPositions)] = at::empty(tokens_BT.sizes(), at::kLong);
  }
  const std::int64_t micro_batch = config.train().micro_batch();
  batch = batch.narrow(0, micro_batch > 0 ? std::min(micro_batch, batch.size()) : batch.size())
              .to(at::kMeta);
  NoiseKey noise;
  noise.step = at::empty({1}, batch.sample_ids_B.options());
  noise.sample_ids_B = batch.sample_ids_B;
  noise.global_batch = config.train().global_batch();
  const PathRecord record(config.device() == configs::Config::cuda ? at::kCUDA : at::kCPU);
  model->loss_sums(batch, noise);
  return record.taken();
}

std::vector<std::string> slow_attention_paths(const configs::Config& config, const ModelMaker& make,
                                              const Batch& batch) {
  // Layers repeat with the period of their entries.
  configs::Config first_layers = config;
  configs::Model& model = *first_layers.mutable_model();
  const int of_cross = model.encoder().cross_attention_size();
  if (model.has_encoder()) {
    configs::Encoder& encoder = *model.mutable_encoder();
    encoder.set_layers(std::min(encoder.attention_size(), encoder.layers()));
  }
  model.set_layers(std::min(std::max(model.attention_size(), of_cross), model.layers()));
  std::vector<PathTaken> all;
  try {
    all = attention_paths(first_layers, make, batch);
  } catch (const c10::Error& error) {  // must not end a run
    return {fmt::format("its paths are not known, because the meta device lacks an operation: {}",
                        error.what_without_backtrace())};
  }
  std::vector<std::string> result;
  for (const LayerList& list : layer_lists(config.model())) {
    std::vector<std::pair<std::string, std::vector<std::int64_t>>> layers_of_line;
    for (int layer = 0; layer < list.layers; ++layer) {
      for (const std::string& line : lines_of(list, layer % list.entries.size(), all)) {
        const auto known = std::find_if(layers_of_line.begin(), layers_of_line.end(),
                                        [&](const auto& each) { return each.first == line; });
        if (known == layers_of_line.end()) {
          layers_of_line.push_back({line, {layer}});
        } else if (known->second.back() != layer) {
          known->second.push_back(layer);
        }
      }
    }
    for (const auto& [line, layers] : layers_of_line) {
      result.push_back(fmt::format("{}{}, {}", list.what, layers_text(layers), line));
    }
  }
  return result;
}

}  // namespace birkhoff
