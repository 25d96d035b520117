// An analysis of a trained model's attention to one text: maps, figures of each head, divergences
// between heads, and the rank of the residual stream by depth.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "configs/schema/config.pb.h"
#include "launcher/analysis/map_figures.h"
#include "models/model.h"

namespace birkhoff {

// A matrix as a picture of at most kMaxPixels x kMaxPixels: each pixel is the mean of the elements
// that it covers.
struct Picture {
  static constexpr std::int64_t kMaxPixels = 256, kLevels = 64;

  std::string name;                    // "head 2, routing"
  std::int64_t rows = 0, columns = 0;  // of the matrix
  std::int64_t height = 0, width = 0;  // pixels
  // A character for each pixel, row after row: '0' plus the level round(sqrt(p) (kLevels - 1)), at
  // most kLevels - 1.
  std::string pixels;
};

struct HeadFigures {
  std::string kind;  // the mechanism of its head group
  double entropy = 0, reach = 0;
  BalanceErrors errors;
};

using KindPair = std::pair<std::string, std::string>;  // in alphabetical order
// The mean divergence between a head of the first kind and another head of the second kind.
using Divergences = std::map<KindPair, double>;

// A matrix that a mechanism chooses by, of one (key) head.
struct ChoiceAnalysis {
  std::string name;  // "layer 0, head 1: sort matrix"
  bool balanced = false;
  BalanceErrors errors;
};

struct LayerAnalysis {
  std::vector<HeadFigures> heads;
  std::vector<double> column_sums;  // means over heads of the sorted sums, largest first
  Divergences divergences;
  std::vector<ChoiceAnalysis> choices;
  std::vector<Picture> maps, chosen;  // of the heads to show; `chosen`: of choices
};

struct AttentionAnalysis {
  std::vector<LayerAnalysis> layers;
  // distance_to_rank_one() of the inputs, then of the residual stream after each layer.
  std::vector<double> rank_one_distances;
  // The number of choices that are not among the pictures, because these would be too many.
  std::int64_t left_out = 0;
};

// Which maps become pictures, and the choices of which heads: at most kMaxChoices of them.
struct ShownMaps {
  static constexpr std::int64_t kMaxChoices = 64;
  std::vector<std::int64_t> layers, heads;
};

// Runs the model on the tokens, without noise. Local, no gradients.
AttentionAnalysis analyze_attention(Model& model, const configs::Config& config,
                                    const std::vector<std::int32_t>& tokens,
                                    const ShownMaps& shown);

}  // namespace birkhoff
