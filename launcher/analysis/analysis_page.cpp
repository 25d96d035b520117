#include "launcher/analysis/analysis_page.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "runtime/reporting/display_text.h"
#include "runtime/reporting/plot.h"

namespace birkhoff {
namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
constexpr std::size_t kMaxPoints = 256;  // of a line of column sums

// The policy makes the browser refuse every request, whatever the page holds.
constexpr char kHead[] = R"(<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>Attention</title>
<style>
  :root { color-scheme: light dark; }
  body { font: 14px sans-serif; margin: 1em auto; max-width: 76em; padding: 0 1em 3em; }
  table { border-collapse: collapse; }
  th, td { padding: 0.15em 0.7em; text-align: right; border-bottom: 1px solid #8884; }
  .maps { display: flex; flex-wrap: wrap; gap: 1em; }
  figure { margin: 0; }
  canvas { width: 256px; height: 256px; image-rendering: pixelated; border: 1px solid #8888; }
  svg { max-width: 100%; height: auto; }
  #readout { position: fixed; bottom: 0; left: 0; right: 0; margin: 0; padding: 0.5em 1em;
             background: Canvas; border-top: 1px solid #8888; min-height: 1.2em; }
</style>
</head>
<body>
)";

// Draws each canvas from its characters, and reads the weight below the pointer.
constexpr char kScript[] = R"(<script>
const readout = document.getElementById('readout');
const levels = 63, first = 48;
const token = (i, count) => count == tokens.length ? ' ' + JSON.stringify(tokens[i]) : '';
for (const canvas of document.querySelectorAll('canvas')) {
  const { pixels, rows, columns } = canvas.dataset;
  const image = new ImageData(canvas.width, canvas.height);
  for (let i = 0; i < pixels.length; ++i) {
    image.data.set([0, 114, 178, (pixels.charCodeAt(i) - first) * 255 / levels], 4 * i);
  }
  canvas.getContext('2d').putImageData(image, 0, 0);
  canvas.onmousemove = event => {
    const x = Math.min(canvas.width - 1, Math.floor(event.offsetX * canvas.width / 256));
    const y = Math.min(canvas.height - 1, Math.floor(event.offsetY * canvas.height / 256));
    const row = Math.floor(y * rows / canvas.height);
    const column = Math.floor(x * columns / canvas.width);
    const level = (pixels.charCodeAt(y * canvas.width + x) - first) / levels;
    readout.textContent = canvas.getAttribute('aria-label') + ': row ' + row + token(row, rows) +
      ', column ' + column + token(column, columns) + ', weight about ' + (level * level).toPrecision(2);
  };
}
document.body.dataset.drawn = document.querySelectorAll('canvas').length;
</script>
)";

std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : display_text(text)) {
    if (c == '&') result += "&amp;";
    if (c == '<') result += "&lt;";
    if (c == '>') result += "&gt;";
    if (c == '"') result += "&quot;";
    if (std::string_view("&<>\"").find(c) == std::string_view::npos) result += c;
  }
  return result;
}

MeanAndDeviation statistics(const std::vector<double>& values) {
  double sum = 0, squares = 0;
  const auto count = static_cast<double>(values.size());
  for (const double value : values) sum += value;
  const double mean = values.empty() ? kNone : sum / count;
  for (const double value : values) squares += (value - mean) * (value - mean);
  return {mean, values.size() < 2 ? kNone : std::sqrt(squares / (count - 1))};
}

std::string cell(double value) { return std::isnan(value) ? "-" : fmt::format("{:.4f}", value); }

std::string html_row(const std::vector<std::string>& cells, const char* tag = "td") {
  std::string text = "<tr>";
  for (const std::string& each : cells) {
    text += fmt::format("<{0}>{1}</{0}>", tag, escaped(each));
  }
  return text + "</tr>\n";
}

std::string divergences_html(const std::vector<AnalyzedRun>& runs) {
  const DivergenceTable table = divergence_table(runs);
  if (table.pairs.empty()) return "";
  std::vector<std::string> names = {"layer"};
  for (const auto& [one, other] : table.pairs) names.push_back(one + ", " + other);
  const auto texts = [](std::string name, const std::vector<MeanAndDeviation>& values) {
    std::vector<std::string> cells = {std::move(name)};
    for (const MeanAndDeviation& value : values) cells.push_back(value.text());
    return cells;
  };
  std::string html = fmt::format(
      "<h2>Divergence between heads</h2>\n<p>Mean Jensen-Shannon divergence between two heads of "
      "these mechanisms, in nats, at most {:.4f}{}.</p>\n<table>\n",
      std::log(2.0), runs.size() > 1 ? "; mean and standard deviation of the runs" : "");
  html += html_row(names, "th");
  for (std::size_t l = 0; l < table.layers.size(); ++l) {
    html += html_row(texts(fmt::format("{}", l), table.layers[l]));
  }
  return html + html_row(texts("all", table.all)) + "</table>\n";
}

std::string heads_html(const AttentionAnalysis& analysis) {
  std::string html =
      "<h2>Heads</h2>\n<p>Entropy of a query's weights in nats, mean distance to its keys in "
      "tokens, and the largest difference of a row sum and of a column sum from 1.</p>\n<table>\n";
  html += html_row(
      {"layer", "head", "mechanism", "entropy", "distance", "row error", "column error"}, "th");
  for (std::size_t l = 0; l < analysis.layers.size(); ++l) {
    const std::vector<HeadFigures>& heads = analysis.layers[l].heads;
    for (std::size_t h = 0; h < heads.size(); ++h) {
      html += html_row({fmt::format("{}", l), fmt::format("{}", h), heads[h].kind,
                        cell(heads[h].entropy), cell(heads[h].reach), cell(heads[h].errors.rows),
                        cell(heads[h].errors.columns)});
    }
  }
  return html + "</table>\n";
}

std::string column_sums_svg(const AttentionAnalysis& analysis) {
  Plot plot{.title = "Column sums of the maps, sorted: a doubly stochastic map has only 1",
            .x = {"key, by its sum"},
            .y = {"sum"},
            .lines = {}};
  for (std::size_t l = 0; l < analysis.layers.size(); ++l) {
    PlotLine line{.name = fmt::format("layer {}", l), .points = {}, .colour = static_cast<int>(l)};
    const std::vector<double>& sums = analysis.layers[l].column_sums;
    const std::size_t step = (sums.size() + kMaxPoints - 1) / kMaxPoints;
    for (std::size_t s = 0; s < sums.size(); s += step) {
      line.points.emplace_back(static_cast<double>(s + 1), sums[s]);
    }
    plot.lines.push_back(std::move(line));
  }
  return plot_svg(plot, SvgPlace::kPage);
}

std::string rank_svg(const std::vector<AnalyzedRun>& runs) {
  Plot plot{.title = "Relative distance of the residual stream to rank one, by depth",
            .x = {"layers"},
            .y = {"distance"},
            .lines = {}};
  for (std::size_t i = 0; i < runs.size(); ++i) {
    PlotLine line{
        .name = runs[i].name, .points = {}, .colour = static_cast<int>(i), .marked = true};
    const std::vector<double>& distances = runs[i].analysis.rank_one_distances;
    for (std::size_t l = 0; l < distances.size(); ++l) {
      line.points.emplace_back(static_cast<double>(l), distances[l]);
    }
    plot.lines.push_back(std::move(line));
  }
  return plot_svg(plot, SvgPlace::kPage);
}

std::string balances_html(const AttentionAnalysis& analysis) {
  std::string rows;
  for (const LayerAnalysis& layer : analysis.layers) {
    for (const ChoiceAnalysis& choice : layer.choices) {
      if (!choice.balanced) continue;
      rows += html_row({choice.name, cell(choice.errors.rows), cell(choice.errors.columns)});
    }
  }
  if (rows.empty()) return "";
  return "<p>The largest difference of a sum of a balanced matrix from 1. A causal one cannot have "
         "columns that sum to 1.</p>\n<table>\n" +
         html_row({"", "row error", "column error"}, "th") + rows + "</table>\n";
}

void append_picture(std::string& html, const Picture& picture) {
  html += fmt::format(
      "<figure><canvas role=\"img\" aria-label=\"{0}\" width=\"{1}\" height=\"{2}\" "
      "data-rows=\"{3}\" data-columns=\"{4}\" data-pixels=\"{5}\"></canvas>"
      "<figcaption>{0}</figcaption></figure>\n",
      escaped(picture.name), picture.width, picture.height, picture.rows, picture.columns,
      picture.pixels);
}

std::string pictures_html(const AttentionAnalysis& analysis) {
  std::string maps, choices;
  for (const LayerAnalysis& layer : analysis.layers) {
    for (const Picture& picture : layer.maps) append_picture(maps, picture);
    for (const Picture& picture : layer.chosen) append_picture(choices, picture);
  }
  std::string html =
      "<h2>Maps</h2>\n<p>Rows are queries, columns keys; the darker, the larger the weight (its "
      "square root). Point at a pixel to read it.</p>\n<div class=\"maps\">\n" +
      maps + "</div>\n";
  if (choices.empty()) return html;
  return html +
         "<h2>Choices</h2>\n<p>Sort matrices: rows are destinations, columns sources, in blocks of "
         "tokens. Clusters: rows are tokens, columns clusters.</p>\n<div class=\"maps\">\n" +
         choices + "</div>\n";
}

// A JavaScript array that no HTML tag can end.
std::string tokens_script(const std::vector<std::string>& tokens) {
  std::vector<std::string> shown;
  for (const std::string& token : tokens) shown.push_back(display_text(token));
  std::string json = nlohmann::json(shown).dump();
  for (std::size_t at = 0; (at = json.find('<', at)) != std::string::npos;) {
    json.replace(at, 1, "\\u003c");
  }
  return "<script>const tokens = " + json + ";</script>\n";
}

}  // namespace

std::string MeanAndDeviation::text() const {
  return std::isnan(deviation) ? cell(mean) : fmt::format("{:.4f} ± {:.4f}", mean, deviation);
}

DivergenceTable divergence_table(const std::vector<AnalyzedRun>& runs) {
  DivergenceTable table;
  const std::size_t layers = runs.front().analysis.layers.size();
  std::set<KindPair> pairs;
  for (const AnalyzedRun& run : runs) {
    for (const LayerAnalysis& layer : run.analysis.layers) {
      for (const auto& [pair, divergence] : layer.divergences) pairs.insert(pair);
    }
  }
  table.pairs.assign(pairs.begin(), pairs.end());
  table.layers.resize(layers);
  for (const KindPair& pair : table.pairs) {
    std::vector<double> means;  // over layers, of each run
    std::vector<std::vector<double>> by_layer(layers);
    for (const AnalyzedRun& run : runs) {
      std::vector<double> of_run;
      for (std::size_t l = 0; l < layers; ++l) {
        const Divergences& divergences = run.analysis.layers[l].divergences;
        const auto found = divergences.find(pair);
        if (found == divergences.end()) continue;
        by_layer[l].push_back(found->second);
        of_run.push_back(found->second);
      }
      if (!of_run.empty()) means.push_back(statistics(of_run).mean);
    }
    for (std::size_t l = 0; l < layers; ++l) table.layers[l].push_back(statistics(by_layer[l]));
    table.all.push_back(statistics(means));
  }
  return table;
}

std::string analysis_page(const std::vector<AnalyzedRun>& runs, const std::string& text,
                          const std::vector<std::string>& notes) {
  std::string html = kHead;
  html += fmt::format("<h1>Attention in {}</h1>\n<ul>\n", escaped(runs.front().name));
  for (const AnalyzedRun& run : runs) {
    html += fmt::format("<li>{}, step {}: the first {} tokens of {}</li>\n", escaped(run.name),
                        run.step, run.tokens.size(), escaped(text));
  }
  for (const std::string& note : notes) html += "<li>" + escaped(note) + "</li>\n";
  if (const std::int64_t left_out = runs.front().analysis.left_out; left_out > 0) {
    html += fmt::format(
        "<li>{} pictures of choices are left out; show fewer layers or heads</li>\n", left_out);
  }
  html += "</ul>\n";
  if (runs.size() > 1) html += "<p>Heads, column sums and maps are of the first run.</p>\n";
  const AttentionAnalysis& first = runs.front().analysis;
  html += divergences_html(runs) + heads_html(first) + "<h2>Balance and rank</h2>\n" +
          balances_html(first) + column_sums_svg(first) + rank_svg(runs) + pictures_html(first) +
          "<p id=\"readout\"></p>\n" + tokens_script(runs.front().tokens) + kScript +
          "</body>\n</html>\n";
  return html;
}

}  // namespace birkhoff
