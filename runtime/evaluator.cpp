#include "runtime/evaluator.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "cluster/base/error.h"
#include "cluster/base/text/number_text.h"
#include "configs/schema/config.pb.h"
#include "data/corpus/corpus.h"
#include "data/loader/document_rows.h"
#include "runtime/tasks/task.h"

namespace birkhoff {
namespace {

void add_predictions(const Batch& batch, const LossSums& sums, ConfusionMatrix& confusion) {
  require(sums.predicted_B.defined(), "a classifier says what it predicts");
  const at::Tensor predicted_B = sums.predicted_B.cpu();
  const auto* predicted = predicted_B.const_data_ptr<std::int64_t>();
  const at::Tensor labels_B = batch.at(field::kLabels).cpu();
  const auto* labels = labels_B.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < batch.size(); ++i) confusion.add(labels[i], predicted[i]);
}

// The sums of DocumentSums, the nats as multiples of 1 / kUnitsPerNat: 5e11 nats fit.
struct DocumentCounts {
  static constexpr double kUnitsPerNat = 1 << 24;
  std::vector<std::int64_t> targets, units;

  void add(const Batch& batch, const LossSums& sums) {
    const at::Tensor documents_BT = batch.at(field::kDocuments).contiguous(),
                     mask_BT = batch.at(field::kMask).contiguous(),
                     nats_N = sums.nats_N.to(at::kCPU, at::kDouble);
    const auto* documents = documents_BT.const_data_ptr<std::int64_t>();
    const auto* mask = mask_BT.const_data_ptr<std::uint8_t>();
    const auto* nats = nats_N.const_data_ptr<double>();
    for (std::int64_t i = 0; i < nats_N.numel(); ++i) {
      if (mask[i] == 0) continue;
      const auto document = static_cast<std::size_t>(documents[i]);
      ++targets.at(document);
      // If it is not finite, neither is the loss of the split.
      if (std::isfinite(nats[i])) units[document] += std::llround(nats[i] * kUnitsPerNat);
    }
  }
};

// Integers, so the sums over ranks are exact. Collective.
void add_up(ProcessGroup& group, std::vector<std::int64_t>& counts, const char* what) {
  const at::Tensor of_rank =
      at::from_blob(counts.data(), {static_cast<std::int64_t>(counts.size())}, at::kLong);
  const at::Tensor all = of_rank.to(group.device(), /*non_blocking=*/false, /*copy=*/true);
  group.all_reduce(all, ReduceOp::kSum, what);
  of_rank.copy_(all);
}

}  // namespace

std::string EvaluationPlan::withheld() const {
  const std::string why = targets ? targets->withheld() : "";
  return why.empty() ? "" : fmt::format("{}: {}", split, why);
}

std::string no_targets_text(const std::string& split) {
  return fmt::format(
      "split \"{}\": nothing to predict: each document is one token, without an end mark, and "
      "data.restart_at_documents hides the others",
      split);
}

Evaluator::Evaluator(Model& model, ProcessGroup& group, EvaluationPlan plan,
                     std::function<Batch(std::int64_t, std::int64_t)> read)
    : model_(model),
      group_(group),
      plan_(std::move(plan)),
      read_(std::move(read)),
      figures_(model.figures()) {
  require(plan_.micro_batch > 0 && plan_.num_sequences > 0, "an evaluation reads something");
}

std::optional<Evaluation> Evaluator::run(const std::function<bool()>& stops) {
  const at::NoGradGuard no_grad;
  const std::int64_t num_batches =
      (plan_.num_sequences + plan_.micro_batch - 1) / plan_.micro_batch;
  // One rank fills each row and the others leave it zero: the sum over ranks is exact.
  enum Column : std::int64_t { kNats, kCount, kTokens, kFigures };
  const std::int64_t num_columns = kFigures + figures_.num_columns();
  at::Tensor sums = at::zeros({num_batches, num_columns}, at::kDouble);
  std::optional<ConfusionMatrix> confusion;
  if (plan_.targets && plan_.targets->classes() > 0) confusion.emplace(plan_.targets->classes());
  std::optional<DocumentCounts> documents;
  if (const auto count = static_cast<std::size_t>(plan_.num_documents); count > 0) {
    documents = {.targets = std::vector<std::int64_t>(count),
                 .units = std::vector<std::int64_t>(count)};
  }
  const auto read = [&](std::int64_t j) {
    const std::int64_t begin = j * plan_.micro_batch;
    const std::int64_t end = std::min(begin + plan_.micro_batch, plan_.num_sequences);
    return read_(begin, end);
  };
  at::Tensor past_BNMC;  // of lanes
  const auto loss_sums_of = [&](const Batch& on_host) {
    Batch batch = on_host.to(group_.device());
    if (past_BNMC.defined()) {
      batch.fields.emplace(field::kPast, past_BNMC.narrow(0, 0, batch.size()));
    }
    LossSums loss_sums = model_.loss_sums(batch, std::nullopt);
    if (plan_.in_lanes) past_BNMC = loss_sums.past_BNMC;
    return loss_sums;
  };
  const auto compute = [&](std::int64_t j) {
    const Batch batch = read(j);
    const LossSums loss_sums = loss_sums_of(batch);
    if (confusion) add_predictions(batch, loss_sums, *confusion);
    // In lanes all ranks compute the same.
    if (documents && (!plan_.in_lanes || group_.rank() == 0)) documents->add(batch, loss_sums);
    double* row = sums.mutable_data_ptr<double>() + j * num_columns;
    row[kNats] = loss_sums.nats.item<double>();
    row[kCount] = loss_sums.count.item<double>();
    row[kTokens] = loss_sums.tokens.defined() ? loss_sums.tokens.item<double>() : row[kCount];
    require(figures_.complete(loss_sums.named), "an evaluation has the sums of all figures");
    for (const auto& [name, value] : loss_sums.named) {
      const std::int64_t column = figures_.column(name);
      require(column >= 0, "every named sum of an evaluation belongs to a figure");
      row[kFigures + column] = value.item<double>();
    }
  };
  const std::int64_t at_a_time = plan_.in_lanes ? 1 : group_.size();
  for (std::int64_t first = 0; first < num_batches; first += at_a_time) {
    const std::int64_t mine = plan_.in_lanes ? first : first + group_.rank();
    // A rank without a micro-batch computes one without counting it, if the others need its part
    // of the parameters.
    if (mine < num_batches) {
      compute(mine);
    } else if (model_.parameters().slices() != nullptr) {
      loss_sums_of(read(num_batches - 1));
    }
    if (stops()) return std::nullopt;
  }
  if (plan_.in_lanes && group_.rank() > 0) sums.zero_();  // those of rank 0 count
  const at::Tensor reduced = sums.to(group_.device());
  group_.all_reduce(reduced, ReduceOp::kSum, "evaluation");
  sums = reduced.cpu();
  std::vector<double> totals(static_cast<std::size_t>(num_columns), 0.0);
  for (std::int64_t i = 0; i < sums.numel(); ++i) {
    totals[static_cast<std::size_t>(i % num_columns)] += sums.const_data_ptr<double>()[i];
  }
  const double nats = totals[kNats], count = totals[kCount];
  Evaluation result;
  result.tokens = std::llround(totals[kTokens]);
  result.loss = nats / count;
  if (plan_.targets) {
    require(std::llround(count) == plan_.targets->count(), "the targets that were counted");
    result.task = plan_.targets->figures(nats);
  }
  result.figures = figures_.values(totals.data() + kFigures, count);
  if (confusion) {
    add_up(group_, confusion->counts(), "confusion matrix");
    const double macro_f1 = confusion->macro_f1();
    result.task.figures.push_back(
        {"macro_f1", macro_f1, fmt::format("macro F1 {}", fixed_text(macro_f1, 4))});
    result.confusion = std::move(confusion);
  }
  if (documents) {
    add_up(group_, documents->targets, "targets of documents");
    add_up(group_, documents->units, "losses of documents");
    result.documents.emplace();
    result.documents->targets = std::move(documents->targets);
    for (const std::int64_t units : documents->units)
      result.documents->nats.push_back(static_cast<double>(units) / DocumentCounts::kUnitsPerNat);
  }
  return result;
}

std::unique_ptr<Evaluator> make_evaluator(const Task& task, const configs::Evaluate& what,
                                          const Corpus& corpus, Model& model, ProcessGroup& group,
                                          bool by_document) {
  const std::shared_ptr<SampleSource> source =
      by_document ? task.source_with_documents(corpus, what.split())
                  : task.evaluation_source(corpus, what.split());
  require(source != nullptr, "targets of documents");
  EvaluationPlan plan;
  plan.split = what.split();
  plan.micro_batch = what.micro_batch();
  plan.num_sequences = plan.all_sequences = source->num_samples();
  if (what.sequences() > 0) plan.num_sequences = std::min(plan.all_sequences, what.sequences());
  plan.targets = task.evaluation_targets(corpus, plan.split, plan.num_sequences);
  if (plan.targets->count() == 0) return nullptr;
  plan.in_lanes = !model.past_shape().empty();
  if (by_document) {
    check_has_documents(corpus, plan.split);
    plan.num_documents = corpus.split(plan.split).counts().documents();
  }
  if (!plan.in_lanes) {
    return std::make_unique<Evaluator>(model, group, std::move(plan),
                                       [source](std::int64_t begin, std::int64_t end) {
                                         return read_samples(*source, begin, end);
                                       });
  }
  const std::int64_t sequences = plan.num_sequences, lanes = plan.micro_batch;
  return std::make_unique<Evaluator>(
      model, group, std::move(plan), [=](std::int64_t begin, std::int64_t end) {
        std::vector<std::int64_t> samples;
        for (std::int64_t i = begin; i < end; ++i) {
          // The first lanes have one sequence more than the others if they differ.
          const std::int64_t lane = i % lanes;
          const std::int64_t first = sequences / lanes * lane + std::min(lane, sequences % lanes);
          samples.push_back(first + i / lanes);
        }
        return read_samples(*source, samples);
      });
}

}  // namespace birkhoff
