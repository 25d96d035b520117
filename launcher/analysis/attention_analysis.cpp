// Legend: H heads, L queries, S keys, T tokens, C channels.
#include "launcher/analysis/attention_analysis.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "attention/attention_map.h"
#include "cluster/base/error.h"
#include "configs/loader/message_text.h"
#include "models/classifier.h"
#include "models/decoder.h"
#include "models/transformer/forward_record.h"

namespace birkhoff {
namespace {

Picture picture_of(const at::Tensor& matrix, std::string name) {
  Picture picture{.name = std::move(name),
                  .rows = matrix.size(0),
                  .columns = matrix.size(1),
                  .height = std::min(matrix.size(0), Picture::kMaxPixels),
                  .width = std::min(matrix.size(1), Picture::kMaxPixels),
                  .pixels = {}};
  const at::Tensor pixels =
      at::adaptive_avg_pool2d(matrix.to(at::kFloat).unsqueeze(0), {picture.height, picture.width});
  const at::Tensor levels = pixels.clamp(0, 1)
                                .sqrt()
                                .mul(static_cast<double>(Picture::kLevels - 1))
                                .round()
                                .add('0')
                                .to(at::kByte)
                                .contiguous();
  picture.pixels.assign(reinterpret_cast<const char*>(levels.const_data_ptr<std::uint8_t>()),
                        static_cast<std::size_t>(levels.numel()));
  return picture;
}

// One sequence. What it predicts does not matter.
Batch batch_of(const std::vector<std::int32_t>& tokens, bool classifies) {
  const at::Tensor inputs_BT =
      at::tensor(tokens, at::TensorOptions(at::kInt)).to(at::kLong).unsqueeze(0);
  Batch batch;
  batch.fields.emplace(field::kInputs, inputs_BT);
  if (classifies) {
    batch.fields.emplace(field::kLengths, at::full({1}, inputs_BT.size(1), at::kLong));
  } else {
    batch.fields.emplace(field::kTargets, inputs_BT);
    batch.fields.emplace(field::kMask, at::ones(inputs_BT.sizes(), at::kByte));
  }
  batch.sample_ids_B = at::zeros({1}, at::kLong);
  return batch;
}

Divergences divergences_of(const at::Tensor& map_HLS, const std::vector<HeadFigures>& heads) {
  std::map<KindPair, std::pair<double, int>> sums;
  for (std::size_t a = 0; a < heads.size(); ++a) {
    for (std::size_t b = 0; b < a; ++b) {
      const double divergence = mean_divergence(map_HLS[static_cast<std::int64_t>(a)],
                                                map_HLS[static_cast<std::int64_t>(b)]);
      if (std::isnan(divergence)) continue;
      auto& [sum, count] = sums[std::minmax(heads[a].kind, heads[b].kind)];
      sum += divergence;
      ++count;
    }
  }
  Divergences means;
  for (const auto& [pair, sum] : sums) means.emplace(pair, sum.first / sum.second);
  return means;
}

void add_heads(const at::Tensor& map_HLS, const std::vector<std::string>& kinds,
               LayerAnalysis& layer) {
  at::Tensor sums_S = at::zeros({map_HLS.size(2)}, at::kDouble);
  for (std::size_t h = 0; h < kinds.size(); ++h) {
    const at::Tensor map_LS = map_HLS[static_cast<std::int64_t>(h)];
    layer.heads.push_back({.kind = kinds[h],
                           .entropy = mean_entropy(map_LS),
                           .reach = mean_reach(map_LS),
                           .errors = balance_errors(map_LS)});
    sums_S += std::get<0>(map_LS.to(at::kDouble).sum(0).sort(0, /*descending=*/true));
  }
  sums_S = (sums_S / static_cast<double>(kinds.size())).contiguous();
  const double* sums = sums_S.const_data_ptr<double>();
  layer.column_sums.assign(sums, sums + sums_S.numel());
  layer.divergences = divergences_of(map_HLS, layer.heads);
}

bool is_among(std::int64_t value, const std::vector<std::int64_t>& values) {
  return std::find(values.begin(), values.end(), value) != values.end();
}

// Adds the choices of a head group whose first head has the number `first`. Heads that share keys
// have one choice. Returns how many pictures were left out because `space` ran out.
std::int64_t add_choices(const RecordedAttention& recorded, std::int64_t first,
                         const std::string& layer_name, const std::vector<std::int64_t>& heads,
                         std::int64_t& space, LayerAnalysis& layer) {
  const std::int64_t group_heads = recorded.in.q_BHLD.size(1);
  std::int64_t left_out = 0;
  for (const Choice& choice : recorded.mechanism->choices(recorded.in)) {
    const at::Tensor matrix_HRC = choice.matrix_BHRC[0];
    const std::int64_t sharing = group_heads / matrix_HRC.size(0);
    for (std::int64_t k = 0; k < matrix_HRC.size(0); ++k) {
      const std::int64_t head = first + k * sharing;
      const std::string name = fmt::format("{}, head {}: {}", layer_name, head, choice.name);
      layer.choices.push_back({name, choice.balanced, balance_errors(matrix_HRC[k])});
      const bool is_shown = std::any_of(heads.begin(), heads.end(), [&](std::int64_t shown) {
        return shown >= head && shown < head + sharing;
      });
      if (!is_shown) continue;
      if (space == 0) {
        ++left_out;
        continue;
      }
      layer.chosen.push_back(picture_of(matrix_HRC[k], name));
      --space;
    }
  }
  return left_out;
}

}  // namespace

AttentionAnalysis analyze_attention(Model& model, const configs::Config& config,
                                    const std::vector<std::int32_t>& tokens,
                                    const ShownMaps& shown) {
  const at::NoGradGuard no_gradients;
  ForwardRecord record;
  if (Classifier* classifier = model.classifier()) {
    classifier->log_probabilities(batch_of(tokens, /*classifies=*/true));
  } else {
    model.loss_sums(batch_of(tokens, /*classifies=*/false), std::nullopt);
  }
  AttentionAnalysis analysis;
  for (const at::Tensor& stream_BTC : record.streams_BTC) {
    analysis.rank_one_distances.push_back(distance_to_rank_one(stream_BTC[0]));
  }
  const configs::Model& layers = config.model();
  std::int64_t space = ShownMaps::kMaxChoices;
  auto recorded = record.attentions.begin();
  for (int l = 0; l < layers.layers(); ++l) {
    const configs::Attention& attention = layers.attention(l % layers.attention_size());
    std::vector<at::Tensor> maps_HLS;
    std::vector<std::string> kinds;
    LayerAnalysis layer;
    const std::string name = fmt::format("layer {}", l);
    const std::vector<std::int64_t> heads =
        is_among(l, shown.layers) ? shown.heads : std::vector<std::int64_t>{};
    for (const configs::HeadGroup& group : attention.group()) {
      require(recorded != record.attentions.end(), "a head group has not been recorded");
      analysis.left_out += add_choices(*recorded, static_cast<std::int64_t>(kinds.size()), name,
                                       heads, space, layer);
      maps_HLS.push_back(attention_map(*recorded->mechanism, recorded->in)[0]);
      kinds.insert(kinds.end(), static_cast<std::size_t>(maps_HLS.back().size(0)),
                   chosen_member(group.mechanism())->name());
      ++recorded;
    }
    const at::Tensor map_HLS = at::cat(maps_HLS);
    add_heads(map_HLS, kinds, layer);
    for (std::size_t h = 0; h < kinds.size(); ++h) {
      const auto head = static_cast<std::int64_t>(h);
      if (!is_among(head, heads)) continue;
      layer.maps.push_back(
          picture_of(map_HLS[head], fmt::format("{}, head {}: {}", name, h, kinds[h])));
    }
    analysis.layers.push_back(std::move(layer));
  }
  require(recorded == record.attentions.end(), "more head groups than the configuration has");
  return analysis;
}

}  // namespace birkhoff
