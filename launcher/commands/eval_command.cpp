#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>
#include <utility>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "cluster/base/text/plural.h"
#include "data/corpus/corpus.h"
#include "data/prepare/prepare.h"
#include "launcher/commands.h"
#include "launcher/commands/class_report.h"
#include "launcher/commands/model_tokenizer.h"
#include "launcher/commands/progress_lines.h"
#include "launcher/processes/scratch_folder.h"
#include "launcher/runs/model_ranks.h"
#include "launcher/runs/run_paths.h"
#include "runtime/evaluator.h"
#include "runtime/reporting/progress.h"
#include "runtime/run_checks.h"
#include "runtime/tasks/task.h"

namespace birkhoff {
namespace {

// A corpus that holds a whole text in one split. Its folder is removed with this object, or when
// the process ends.
class TextCorpus {
 public:
  static constexpr char kSplit[] = "train";

  // text: a file, a folder, or "-": standard input. Notes on the text go to err. Error(kData) if it
  // is too short to predict a token; other errors as in prepare_corpus().
  TextCorpus(const TokenizerSource& tokenizer, const std::string& text, std::ostream& err) {
    PrepareOptions options;
    options.out = folder().string();
    options.like = tokenizer;
    options.valid_fraction = 0;
    options.paths = {text};
    for (const std::string& note : prepare_corpus(options).notes)
      err << "birkhoff: " << note << '\n';
    const std::int64_t tokens = Corpus(folder()).split(kSplit).stream(0).elements();
    if (tokens < 2) {
      fail(ExitCode::kData, "--text {}: {}, too few to predict one; give more text", text,
           counted(tokens, "token"));
    }
  }
  std::filesystem::path folder() const { return scratch_.path() / "corpus"; }

 private:
  ScratchFolder scratch_{"text"};
};

// Runs the evaluator. Rank 0 shows a line of progress.
Evaluation evaluate_shown(Evaluator& evaluator, const std::string& evaluated, const ModelRank& rank,
                          std::ostream& err) {
  using Clock = std::chrono::steady_clock;
  const EvaluationPlan& plan = evaluator.plan();
  const Clock::time_point start = Clock::now();
  std::int64_t done = 0;
  std::optional<ProgressLines> lines;
  if (rank.world.rank() == 0) lines.emplace(err);
  return *evaluator.run([&] {
    rank.tick();
    if (!lines) return false;
    done = std::min(done + plan.micro_batch * (plan.in_lanes ? 1 : rank.data.size()),
                    plan.num_sequences);
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    const double left =
        seconds * static_cast<double>(plan.num_sequences - done) / static_cast<double>(done);
    lines->show(fmt::format("eval: {}, {} of {} sequences, {} left", evaluated, done,
                            plan.num_sequences, duration_text(left)));
    return false;
  });
}

// The printed results of an evaluation.
struct EvaluationReport {
  const CheckpointFolder& checkpoint;
  std::string evaluated;  // the name of the split or text
  bool is_text_file = false;
  const EvaluationPlan& plan;
  const Evaluation& result;

  std::vector<std::string> class_names() const {
    const auto& names = checkpoint.manifest.class_name();
    return {names.begin(), names.end()};
  }
  // In addition to those in `result`.
  TaskFigures details() const {
    return plan.targets->details(result.loss * static_cast<double>(plan.targets->count()));
  }
};

// Calls visit(document, targets, mean loss) for each document with targets.
template <typename Visit>
void for_each_document(const DocumentSums& sums, const Visit& visit) {
  for (std::size_t i = 0; i < sums.targets.size(); ++i) {
    if (sums.targets[i] == 0) continue;
    visit(i, sums.targets[i], sums.nats[i] / static_cast<double>(sums.targets[i]));
  }
}

// The number of documents with targets, and the mean of their losses.
std::pair<std::int64_t, double> documents_of(const DocumentSums& sums) {
  std::int64_t documents = 0;
  double losses = 0;
  for_each_document(sums, [&](std::size_t, std::int64_t, double loss) {
    ++documents;
    losses += loss;
  });
  return {documents, losses / static_cast<double>(documents)};
}

void write_documents(const std::string& path, const DocumentSums& sums) {
  write_file_durably(path, [&](File& file) {
    for_each_document(sums, [&](std::size_t document, std::int64_t targets, double loss) {
      const nlohmann::ordered_json line = {
          {"document", document}, {"tokens", targets}, {"loss", loss}};
      file.write_all(line.dump() + '\n');
    });
  });
}

std::string json_of(const EvaluationReport& report) {
  const Evaluation& result = report.result;
  nlohmann::ordered_json object = {{"checkpoint", report.checkpoint.path.string()},
                                   {"step", report.checkpoint.manifest.step()},
                                   {report.is_text_file ? "text" : "split", report.evaluated},
                                   {"loss", result.loss},
                                   {"tokens", result.tokens},
                                   {"sequences", report.plan.num_sequences}};
  for (const TaskFigures& figures : {result.task, report.details()}) {
    for (const TaskFigure& figure : figures.figures) object[figure.name] = figure.value;
    for (const TaskCount& count : figures.counts) object[count.name] = count.value;
  }
  if (const std::string why = report.plan.withheld(); !why.empty()) object["withheld"] = why;
  for (const auto& [name, value] : result.figures) object[name] = value;
  if (result.documents) {
    const auto [documents, loss] = documents_of(*result.documents);
    object["documents"] = documents;
    object["loss_per_document"] = loss;
  }
  if (result.confusion) add_classes(*result.confusion, report.class_names(), object);
  return object.dump() + '\n';
}

std::string text_of(const EvaluationReport& report) {
  const Evaluation& result = report.result;
  const TaskFigures details = report.details();
  std::string text =
      fmt::format("step {}, {}: loss {:.4f} nats per {}", report.checkpoint.manifest.step(),
                  report.evaluated, result.loss, report.plan.targets->unit());
  for (const auto* figures : {&result.task.figures, &details.figures}) {
    for (const TaskFigure& figure : *figures) text += ", " + figure.text;
  }
  if (result.confusion) text += ", " + majority_text(*result.confusion, report.class_names());
  text += fmt::format(", {} tokens", result.tokens);
  for (const auto* counts : {&details.counts, &result.task.counts}) {
    for (const TaskCount& count : *counts) {
      if (!count.text.empty()) text += ", " + count.text;
    }
  }
  text +=
      fmt::format(", {} of {} sequences\n", report.plan.num_sequences, report.plan.all_sequences);
  if (result.documents) {
    const auto [documents, loss] = documents_of(*result.documents);
    text += fmt::format("{}: mean loss {:.4f}\n", counted(documents, "document"), loss);
  }
  for (const auto& [name, value] : result.figures) text += fmt::format("{} {:.6g}\n", name, value);
  if (result.confusion) text += class_table(*result.confusion, report.class_names());
  return text;
}

// Evaluates on all ranks; rank 0 prints. Collective over the world.
void evaluate(const EvalArguments& arguments, const ModelRank& rank, std::ostream& out,
              std::ostream& err) {
  ProcessGroup& world = rank.world;
  const bool speaks = world.rank() == 0;
  const CheckpointFolder checkpoint = agreed_checkpoint(arguments.path, world);
  const configs::Config config = config_of(checkpoint, arguments.settings);
  check_same_config(world, config);
  std::optional<TextCorpus> text;
  const std::unique_ptr<Task> task = make_task(config);
  if (!arguments.text.empty() && !task->targets_are_text()) {
    const std::string cure = task->reads_text()
                                 ? fmt::format("classify it with `birkhoff classify {} {}`",
                                               arguments.path, arguments.text)
                                 : "it reads none: name a corpus with --corpus";
    fail(ExitCode::kUsage, "--text {}: the model predicts no text; {}", arguments.text, cure);
  }
  if (!arguments.text.empty() && !task->source_stream().empty()) {
    fail(ExitCode::kUsage,
         "--text {}: the model predicts the targets of pairs; prepare pairs and name them with "
         "--corpus",
         arguments.text);
  }
  if (!arguments.documents.empty() &&
      (!task->targets_are_text() || !task->source_stream().empty())) {
    fail(ExitCode::kUsage,
         "--documents {}: only a language model predicts the tokens of documents; leave it out",
         arguments.documents);
  }
  if (!arguments.text.empty()) text.emplace(tokenizer_source(checkpoint), arguments.text, err);
  const std::string split = text ? TextCorpus::kSplit : arguments.split;
  const Corpus corpus(text                       ? text->folder().string()
                      : arguments.corpus.empty() ? config.data().corpus()
                                                 : arguments.corpus);
  if (task->reads_text()) require_same_tokenizer(*task, checkpoint, arguments.path, corpus);
  require_same_inputs(*task, checkpoint, arguments.path, corpus, split);
  check_same_corpus(world, corpus);
  const std::unique_ptr<Model> model = load_model(checkpoint, *task, rank.place);
  for (const std::string& warning : model->warnings()) {
    if (speaks) err << "birkhoff: warning: " << warning << '\n';
  }

  if (const std::string cut = speaks ? task->cut_texts(corpus, split) : ""; !cut.empty()) {
    err << "birkhoff: warning: " << cut << '\n';
  }

  configs::Evaluate what = config.evaluate();
  what.set_split(split);
  what.set_sequences(arguments.sequences);
  const std::unique_ptr<Evaluator> evaluator =
      make_evaluator(*task, what, corpus, *model, rank.data, !arguments.documents.empty());
  if (evaluator == nullptr) {
    fail(ExitCode::kData, "{}: {}", corpus.folder().string(), no_targets_text(split));
  }
  const EvaluationPlan& plan = evaluator->plan();
  const std::string& evaluated = text ? arguments.text : split;
  const Evaluation result = evaluate_shown(*evaluator, evaluated, rank, err);
  if (!std::isfinite(result.loss)) {
    fail(ExitCode::kNumerical,
         "{}: the loss on {} is not finite: the run had diverged; evaluate an earlier checkpoint",
         checkpoint.path.string(), evaluated);
  }
  if (!speaks) return;
  const EvaluationReport report{.checkpoint = checkpoint,
                                .evaluated = evaluated,
                                .is_text_file = text.has_value(),
                                .plan = plan,
                                .result = result};
  if (const std::string withheld = plan.withheld(); !withheld.empty()) {
    err << "birkhoff: warning: " << withheld << '\n';
  }
  out << (arguments.json ? json_of(report) : text_of(report));
  if (result.documents) write_documents(arguments.documents, *result.documents);
}

// The arguments as a command line, without --ranks.
std::vector<std::string> command_line(const EvalArguments& arguments) {
  std::vector<std::string> line = {"eval",        arguments.path,
                                   "--split",     arguments.split,
                                   "--sequences", std::to_string(arguments.sequences),
                                   "--device",    arguments.device,
                                   "--tensor",    std::to_string(arguments.tensor)};
  if (!arguments.corpus.empty()) line.insert(line.end(), {"--corpus", arguments.corpus});
  for (const std::string& setting : arguments.settings) line.insert(line.end(), {"--set", setting});
  if (!arguments.documents.empty()) line.insert(line.end(), {"--documents", arguments.documents});
  if (arguments.json) line.emplace_back("--json");
  return line;
}

}  // namespace

int eval_command(const EvalArguments& arguments, std::ostream& out, std::ostream& err) {
  if (const std::filesystem::path file = arguments.documents; !file.empty()) {
    // Found before hours of work.
    if (file == "-" || (exists(file) && !is_regular_file(file)) ||
        !is_directory(absolute(file).parent_path())) {
      fail(ExitCode::kUsage, "--documents {}: is not the name of a file in an existing folder",
           arguments.documents);
    }
  }
  const auto check = [&] {
    if (!arguments.text.empty()) {
      fail(ExitCode::kUsage,
           "--text {}: a text is evaluated by one process; leave --ranks and --tensor out, or make "
           "a corpus of it with `birkhoff prepare --like {}`",
           arguments.text, arguments.path);
    }
  };
  return run_on_ranks(
      {.ranks = arguments.ranks,
       .tensor = arguments.tensor,
       .device = arguments.device,
       .command_line = command_line(arguments),
       .model = arguments.path,
       .settings = arguments.settings,
       .sums_on_device = true,
       .check = check,
       .stopped = "nothing was evaluated"},
      [&](const ModelRank& rank) { evaluate(arguments, rank, out, err); }, err);
}

}  // namespace birkhoff
