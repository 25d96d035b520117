// One HTML page about the attention of runs. It needs no network: pictures, plots and its script
// are part of it, and it asks the browser to refuse all requests.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "launcher/analysis/attention_analysis.h"

namespace birkhoff {

struct AnalyzedRun {
  std::string name;  // as the user gave it
  std::int64_t step = 0;
  std::vector<std::string> tokens;  // texts of the analyzed tokens
  AttentionAnalysis analysis;
};

// Of the runs; NaN: none has it. The deviation is that of a sample; NaN for one run.
struct MeanAndDeviation {
  double mean = 0, deviation = 0;

  std::string text() const;  // "0.1776 ± 0.0649", or the mean if there is no deviation
};

// Divergences between kinds of heads: one row for each layer, then one for the mean over layers
// (tables 5 and 4 of Roy et al. 2021). Runs have the same layers and kinds.
struct DivergenceTable {
  std::vector<KindPair> pairs;
  std::vector<std::vector<MeanAndDeviation>> layers;  // one value for each pair
  std::vector<MeanAndDeviation> all;
};
DivergenceTable divergence_table(const std::vector<AnalyzedRun>& runs);

// Figures of heads and pictures are of the first run. `text`: the name of the analyzed text;
// `notes`: lines to show first, such as what was left out.
std::string analysis_page(const std::vector<AnalyzedRun>& runs, const std::string& text,
                          const std::vector<std::string>& notes);

}  // namespace birkhoff
