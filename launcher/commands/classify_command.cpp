#include <fmt/format.h>
#include <signal.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>
#include <span>
#include <utility>

#include "cluster/base/cpu.h"
#include "cluster/base/error.h"
#include "cluster/base/text/plural.h"
#include "cluster/base/text/utf8.h"
#include "data/batch/padded_texts.h"
#include "data/prepare/input/documents.h"
#include "data/text/text_lines.h"
#include "launcher/commands.h"
#include "launcher/commands/text_input.h"
#include "launcher/output.h"
#include "launcher/processes/ranks.h"
#include "launcher/runs/run_paths.h"
#include "models/classifier.h"
#include "runtime/tasks/task.h"

namespace birkhoff {
namespace {

constexpr std::size_t kTextsPerPass = 32;

// A text, its ids (at least one), and its location in the input.
struct Text {
  std::string text, place;
  std::vector<std::int32_t> ids;
};

// Encodes a text as prepare does a document: its ids, then the end mark if there is one.
Text read_text(std::string_view line, const std::string& place, const Tokenizer& tokenizer,
               const configs::CheckpointManifest& manifest) {
  if (line.empty()) fail(ExitCode::kData, "{}: the line is empty; remove it", place);
  // The tables that the model was trained on have no tabs in their texts.
  if (line.find('\t') != std::string_view::npos) {
    const std::string file = place.substr(0, place.rfind(':'));
    fail(ExitCode::kData,
         "{}: the line holds a tab: is this a table? Give one column of it, without its header: "
         "tail -n +2 {} | cut -f COLUMN | birkhoff classify ... -",
         place, file == kStandardInput ? "FILE" : file);
  }
  if (const std::size_t bad = find_invalid_utf8(line);
      manifest.tokenizer() != "bytes" && bad != std::string_view::npos) {
    fail(ExitCode::kData, "{}: byte {} of the line is not UTF-8, which the model reads; convert it",
         place, bad);
  }
  Text text{std::string(line), place, {}};
  try {
    text.ids = tokenizer.encode(text.text);
  } catch (const Error& error) {
    fail(error.code(), "{}: {}", place, error.what());
  }
  if (manifest.has_end_of_document())
    text.ids.push_back(static_cast<std::int32_t>(manifest.end_of_document()));
  if (text.ids.empty()) fail(ExitCode::kData, "{}: the line has no tokens; remove it", place);
  return text;
}

Batch batch_of(const std::vector<Text>& texts, std::int64_t max_tokens) {
  std::vector<std::span<const std::int32_t>> ids;
  for (const Text& text : texts) {
    const std::int64_t count = std::min(max_tokens, std::ssize(text.ids));
    ids.push_back(std::span(text.ids).first(static_cast<std::size_t>(count)));
  }
  return padded_texts(ids);
}

// Classifies texts and prints a line for each.
class TextPrinter {
 public:
  TextPrinter(Classifier& model, const configs::CheckpointManifest& manifest, bool json,
              std::ostream& out)
      : model_(model), json_(json), out_(out) {
    for (const std::string& name : manifest.class_name()) {
      names_.push_back(json ? json_text(name) : name);
    }
  }

  void print(const std::vector<Text>& texts) {
    if (texts.empty()) return;
    const at::Tensor p_BK =
        model_.log_probabilities(batch_of(texts, model_.max_tokens()).to(model_.device()))
            .to(at::kCPU, at::kDouble)
            .exp()
            .contiguous();
    const double* p = p_BK.const_data_ptr<double>();
    for (const Text& text : texts) {
      print(text, p);
      p += p_BK.size(1);
    }
    flush_output(out_);
  }

  // The number of texts that were cut to the model's sequence length.
  std::int64_t num_cut() const { return num_cut_; }

 private:
  // In quotes. Bytes that are not UTF-8 are replaced.
  static std::string json_text(const std::string& text) {
    return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  }

  void print(const Text& text, const double* p) {
    const std::size_t classes = names_.size();
    if (std::any_of(p, p + classes, [](double value) { return !std::isfinite(value); })) {
      fail(ExitCode::kNumerical,
           "{}: the probabilities of its classes are not finite; use an earlier checkpoint",
           text.place);
    }
    num_cut_ += static_cast<std::int64_t>(text.ids.size()) > model_.max_tokens();
    const auto best = static_cast<std::size_t>(std::max_element(p, p + classes) - p);
    if (!json_) {
      out_ << fmt::format("{}\t{:.4f}\n", names_[best], p[best]);
      return;
    }
    out_ << fmt::format("{{\"text\":{},\"class\":{},\"probability\":{},\"probabilities\":{{",
                        json_text(text.text), names_[best], p[best]);
    for (std::size_t k = 0; k < classes; ++k)
      out_ << fmt::format("{}{}:{}", k == 0 ? "" : ",", names_[k], p[k]);
    out_ << "}}\n";
  }

  Classifier& model_;
  const bool json_;
  std::ostream& out_;
  std::vector<std::string> names_;  // of the classes; in JSON form if json_
  std::int64_t num_cut_ = 0;
};

}  // namespace

int classify_command(const ClassifyArguments& arguments, std::ostream& out, std::ostream& err) {
  signal(SIGPIPE, SIG_DFL);  // when the reader of a pipe has left, end without a message
  compute_on_cpu(threads_of_rank(usable_cores()));
  const CheckpointFolder checkpoint = checkpoint_of(arguments.path);
  const std::unique_ptr<Tokenizer> tokenizer = tokenizer_of(checkpoint);
  const std::unique_ptr<Model> loaded = load_model(checkpoint, device_named(arguments.device));
  Classifier* model = loaded->classifier();
  if (model == nullptr) {
    fail(ExitCode::kUsage,
         "{}: a model of this task has no classes; train one with task {{ classification {{}} }}",
         arguments.path);
  }
  if (make_task(checkpoint.manifest.config())->classifies_pairs()) {
    fail(ExitCode::kUsage,
         "{}: the model reads pairs of texts; prepare a table of them, and evaluate it: birkhoff "
         "eval {} --corpus CORPUS",
         arguments.path, arguments.path);
  }
  for (const std::string& warning : loaded->warnings())
    err << "birkhoff: warning: " << warning << '\n';

  TextPrinter printer(*model, checkpoint.manifest, arguments.json, out);
  TextLines lines = open_lines(arguments.file);
  const auto next_text = [&]() -> std::optional<Text> {
    const std::optional<std::string_view> line = lines.next();
    if (!line) return std::nullopt;
    return read_text(*line, lines.place(), *tokenizer, checkpoint.manifest);
  };
  std::vector<Text> texts;
  for (std::optional<Text> text;; texts.push_back(std::move(*text))) {
    // Texts from a slow pipe are classified at once, without waiting for more.
    if (texts.size() == kTextsPerPass || !lines.has_line()) {
      printer.print(texts);
      texts.clear();
    }
    try {
      text = next_text();
    } catch (const Error&) {
      printer.print(texts);  // the texts before the bad line
      throw;
    }
    if (!text) break;
  }
  printer.print(texts);
  if (printer.num_cut() > 0) {
    err << "birkhoff: warning: " << counted(printer.num_cut(), "text was", "texts were")
        << " cut to the model's data.sequence_length = " << model->max_tokens() << " tokens\n";
  }
  return 0;
}

}  // namespace birkhoff
