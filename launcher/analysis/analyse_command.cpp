#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <ostream>

#include "cluster/base/cpu.h"
#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "cluster/base/text/plural.h"
#include "cluster/base/text/utf8.h"
#include "configs/loader/summary.h"
#include "launcher/analysis/analysis_page.h"
#include "launcher/commands.h"
#include "launcher/processes/ranks.h"
#include "launcher/runs/run_paths.h"
#include "launcher/runs/text_table.h"

namespace birkhoff {
namespace {

// Maps have tokens x tokens elements.
constexpr std::int64_t kDefaultTokens = 256;
// Of 64 KiB each, so a page stays below 10 MB.
constexpr std::int64_t kMaxPictures = 64;
constexpr std::int64_t kMaxTextBytes = 64 << 20;

// The tokens to analyze: --tokens, or up to kDefaultTokens that the text and the model have.
std::vector<std::int32_t> tokens_of(const AnalyseArguments& arguments, const std::string& text,
                                    const Tokenizer& tokenizer, const configs::Config& config) {
  std::vector<std::int32_t> ids = tokenizer.encode(text);
  const std::int64_t most = config.data().sequence_length();
  if (arguments.tokens && *arguments.tokens > most) {
    fail(ExitCode::kUsage, "--tokens {}: the model reads data.sequence_length = {} at most",
         *arguments.tokens, most);
  }
  const auto found = static_cast<std::int64_t>(ids.size());
  const std::int64_t wanted = arguments.tokens.value_or(std::min({kDefaultTokens, most, found}));
  if (found < std::max<std::int64_t>(wanted, 2)) {
    fail(ExitCode::kData, "--text {}: has {}, fewer than {}; give more text", arguments.text,
         counted(found, "token"), std::max<std::int64_t>(wanted, 2));
  }
  ids.resize(static_cast<std::size_t>(wanted));
  return ids;
}

AnalyzedRun analyze_run(const AnalyseArguments& arguments, const std::string& path,
                        const CheckpointFolder& checkpoint, const std::string& text,
                        const ShownMaps& shown, std::ostream& err) {
  const configs::Config config = config_of(checkpoint);
  if (config.model().has_encoder()) {
    fail(ExitCode::kUsage,
         "{}: a model of pairs reads two texts, and only models of one can be analyzed; name "
         "another run",
         path);
  }
  const std::unique_ptr<Tokenizer> tokenizer = tokenizer_of(checkpoint);
  if (const std::size_t bad = find_invalid_utf8(text);
      checkpoint.manifest.tokenizer() != "bytes" && bad != std::string::npos) {
    fail(ExitCode::kData, "--text {}: byte {} is not UTF-8, which the model reads; convert it",
         arguments.text, bad);
  }
  const std::vector<std::int32_t> ids = tokens_of(arguments, text, *tokenizer, config);
  const std::unique_ptr<Model> model = load_model(checkpoint, at::kCPU);
  for (const std::string& warning : model->warnings())
    err << "birkhoff: warning: " << warning << '\n';
  AnalyzedRun run{.name = path, .step = checkpoint.manifest.step(), .tokens = {}, .analysis = {}};
  for (const std::int32_t id : ids) run.tokens.push_back(tokenizer->text_of(id).value_or("?"));
  run.analysis = analyze_attention(*model, config, ids, shown);
  return run;
}

std::vector<std::int64_t> first_indices(std::int64_t count) {
  std::vector<std::int64_t> all(static_cast<std::size_t>(count));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

// The chosen indices of `count` things, or `fallback`.
std::vector<std::int64_t> chosen(const std::vector<std::int64_t>& indices, std::int64_t count,
                                 const char* option, const char* noun,
                                 std::vector<std::int64_t> fallback) {
  for (const std::int64_t index : indices) {
    if (index < count) continue;
    fail(ExitCode::kUsage, "{} {}: the model has {}, from 0 to {}", option, index,
         counted(count, noun), count - 1);
  }
  if (indices.empty()) return fallback;
  return indices;
}

// The maps that the user chose, or all of the first heads, in layers at equal distances.
ShownMaps shown_maps(const AnalyseArguments& arguments, const configs::Model& model,
                     std::vector<std::string>& notes) {
  ShownMaps shown;
  shown.heads = chosen(arguments.heads, model.heads(), "--heads", "head",
                       first_indices(std::min<std::int64_t>(model.heads(), kMaxPictures)));
  const auto heads = static_cast<std::int64_t>(shown.heads.size());
  const std::int64_t most = std::max<std::int64_t>(1, kMaxPictures / heads),
                     layers = std::min<std::int64_t>(model.layers(), most);
  std::vector<std::int64_t> spread;
  for (std::int64_t i = 0; i < layers; ++i) spread.push_back(i * model.layers() / layers);
  shown.layers = chosen(arguments.layers, model.layers(), "--layers", "layer", spread);
  const std::int64_t pictures = heads * static_cast<std::int64_t>(shown.layers.size());
  if (pictures > kMaxPictures) {
    fail(ExitCode::kUsage, "--layers and --heads choose {} maps; a page shows at most {}", pictures,
         kMaxPictures);
  }
  if (pictures < model.layers() * model.heads()) {
    notes.push_back(
        fmt::format("maps of layers {} and heads {} only; --layers and --heads choose "
                    "others",
                    fmt::join(shown.layers, ", "), fmt::join(shown.heads, ", ")));
  }
  return shown;
}

std::string divergences_text(const std::vector<AnalyzedRun>& runs) {
  const DivergenceTable table = divergence_table(runs);
  if (table.pairs.empty()) return "";
  std::vector<TableColumn> columns = {{"layer", true}};
  for (const auto& [one, other] : table.pairs) columns.push_back({one + ", " + other, true});
  std::vector<std::vector<std::string>> rows;
  const auto add_row = [&](std::string name, const std::vector<MeanAndDeviation>& values) {
    rows.push_back({std::move(name)});
    for (const MeanAndDeviation& value : values) rows.back().push_back(value.text());
  };
  for (std::size_t l = 0; l < table.layers.size(); ++l)
    add_row(fmt::format("{}", l), table.layers[l]);
  add_row("all", table.all);
  return "Jensen-Shannon divergence between heads, in nats\n" + text_table(columns, rows) + '\n';
}

}  // namespace

int analyse_command(const AnalyseArguments& arguments, std::ostream& out, std::ostream& err) {
  compute_on_cpu(threads_of_rank(usable_cores()));
  if (arguments.html.empty()) fail(ExitCode::kUsage, "--html '' names no file");
  std::vector<CheckpointFolder> checkpoints;
  for (const std::string& path : arguments.runs) checkpoints.push_back(checkpoint_of(path));
  const std::string text = arguments.text == "-"
                               ? read_standard_input(kMaxTextBytes)
                               : read_stream(arguments.text, kMaxTextBytes, ExitCode::kUsage);
  const configs::Model model = config_of(checkpoints[0]).model();
  std::vector<std::string> notes;
  const ShownMaps shown = shown_maps(arguments, model, notes);
  std::vector<AnalyzedRun> runs;
  for (std::size_t i = 0; i < checkpoints.size(); ++i) {
    const configs::Model other = config_of(checkpoints[i]).model();
    if (other.layers() != model.layers() || attention_text(other) != attention_text(model)) {
      fail(ExitCode::kUsage,
           "{}: its {} ({}) are not those of {}, {} ({}); give runs that differ in seed or data",
           arguments.runs[i], counted(other.layers(), "layer"), attention_text(other),
           arguments.runs[0], counted(model.layers(), "layer"), attention_text(model));
    }
    // Pictures are of the first run.
    runs.push_back(analyze_run(arguments, arguments.runs[i], checkpoints[i], text,
                               i == 0 ? shown : ShownMaps{}, err));
  }
  write_file_durably(arguments.html, analysis_page(runs, arguments.text, notes));
  out << divergences_text(runs);
  for (const std::string& note : notes) out << note << '\n';
  out << fmt::format("{} of {} on the first {} of {}\n", arguments.html,
                     counted(static_cast<std::int64_t>(runs.size()), "run"),
                     counted(static_cast<std::int64_t>(runs[0].tokens.size()), "token"),
                     arguments.text);
  return 0;
}

}  // namespace birkhoff
