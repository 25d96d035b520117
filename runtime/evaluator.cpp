#include "runtime/evaluator.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "cluster/base/error.h"
#include "configs/config.pb.h"
#include "data/corpus/corpus.h"
#include "runtime/tasks/task.h"

namespace birkhoff {

EvaluationPlan plan_evaluation(const Corpus& corpus, const configs::Evaluate& config,
                               const std::string& stream, std::int64_t sequence_length,
                               std::int64_t num_windows) {
  if (num_windows == 0) {
    fail(ExitCode::kData,
         "{}: split \"{}\" is too short to evaluate on: it holds fewer than two tokens",
         corpus.folder().string(), config.split());
  }
  EvaluationPlan plan;
  plan.split = config.split();
  plan.micro_batch = config.micro_batch();
  plan.bytes = static_cast<double>(corpus.split(plan.split).counts().bytes());
  plan.num_windows = plan.all_windows = num_windows;
  if (config.sequences() > 0 && config.sequences() < num_windows) {
    plan.num_windows = config.sequences();
    // All windows but the split's last are full, and the first token of the split is never a
    // target.
    const double targets = static_cast<double>(corpus.stream(plan.split, stream).elements() - 1);
    plan.bytes *= static_cast<double>(plan.num_windows * sequence_length) / targets;
  }
  return plan;
}

Evaluator::Evaluator(Model& model, ProcessGroup& group, EvaluationPlan plan,
                     std::function<Batch(std::int64_t, std::int64_t)> read)
    : model_(model),
      group_(group),
      plan_(std::move(plan)),
      read_(std::move(read)),
      figures_(model.figures()) {
  require(plan_.micro_batch > 0 && plan_.num_windows > 0, "an evaluation reads something");
}

Evaluation Evaluator::run(const std::function<void()>& tick) {
  const at::NoGradGuard no_grad;
  const std::int64_t num_batches = (plan_.num_windows + plan_.micro_batch - 1) / plan_.micro_batch;
  // Columns: nats, counted targets, sums of figures. One rank fills each row and the others leave
  // it zero: the sum over ranks is exact.
  const std::int64_t num_columns = 2 + figures_.num_columns();
  at::Tensor sums = at::zeros({num_batches, num_columns}, at::kDouble);
  for (std::int64_t j = group_.rank(); j < num_batches; j += group_.size()) {
    const std::int64_t begin = j * plan_.micro_batch;
    const std::int64_t end = std::min(begin + plan_.micro_batch, plan_.num_windows);
    const LossSums loss_sums =
        model_.loss_sums(read_(begin, end).to(group_.device()), std::nullopt);
    double* row = sums.mutable_data_ptr<double>() + j * num_columns;
    row[0] = loss_sums.nats.item<double>();
    row[1] = loss_sums.count.item<double>();
    require(figures_.complete(loss_sums.named), "an evaluation has the sums of all figures");
    for (const auto& [name, value] : loss_sums.named) {
      const std::int64_t column = figures_.column(name);
      require(column >= 0, "every named sum of an evaluation belongs to a figure");
      row[2 + column] = value.item<double>();
    }
    tick();
  }
  const at::Tensor reduced = sums.to(group_.device());
  group_.all_reduce(reduced, ReduceOp::kSum, "evaluation");
  sums = reduced.cpu();
  std::vector<double> totals(static_cast<std::size_t>(num_columns), 0.0);
  for (std::int64_t i = 0; i < sums.numel(); ++i) {
    totals[static_cast<std::size_t>(i % num_columns)] += sums.const_data_ptr<double>()[i];
  }
  const double nats = totals[0], count = totals[1];
  Evaluation result;
  result.tokens = std::llround(count);
  result.bytes = std::llround(plan_.bytes);
  result.loss = nats / count;
  result.bits_per_byte = nats / std::numbers::ln2 / plan_.bytes;
  result.figures = figures_.values(totals.data() + 2, count);
  return result;
}

std::unique_ptr<Evaluator> make_evaluator(const configs::Config& config,
                                          const configs::Evaluate& what, const Corpus& corpus,
                                          Model& model, ProcessGroup& group) {
  const std::shared_ptr<SampleSource> source = evaluation_source(config, what.split(), corpus);
  const EvaluationPlan plan = plan_evaluation(
      corpus, what, text_stream(config), config.data().sequence_length(), source->num_samples());
  return std::make_unique<Evaluator>(
      model, group, plan,
      [source](std::int64_t begin, std::int64_t end) { return read_samples(*source, begin, end); });
}

}  // namespace birkhoff
