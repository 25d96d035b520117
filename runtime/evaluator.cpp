#include "runtime/evaluator.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "cluster/base/error.h"
#include "configs/config.pb.h"
#include "data/corpus/corpus.h"
#include "data/loader/loader.h"

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
    : model_(model), group_(group), plan_(std::move(plan)), read_(std::move(read)) {
  require(plan_.micro_batch > 0 && plan_.num_windows > 0, "an evaluation reads something");
}

Evaluation Evaluator::run(const std::function<void()>& tick) {
  const at::NoGradGuard no_grad;
  const std::int64_t num_batches = (plan_.num_windows + plan_.micro_batch - 1) / plan_.micro_batch;
  // One rank fills each row and the others leave it zero: the sum over ranks is exact.
  at::Tensor sums = at::zeros({num_batches, 2}, at::kDouble);
  double* nats_and_count = sums.mutable_data_ptr<double>();
  for (std::int64_t j = group_.rank(); j < num_batches; j += group_.size()) {
    const std::int64_t begin = j * plan_.micro_batch;
    const std::int64_t end = std::min(begin + plan_.micro_batch, plan_.num_windows);
    const LossSums loss_sums =
        model_.loss_sums(read_(begin, end).to(group_.device()), std::nullopt);
    nats_and_count[2 * j] = loss_sums.nats.item<double>();
    nats_and_count[2 * j + 1] = loss_sums.count.item<double>();
    tick();
  }
  const at::Tensor reduced = sums.to(group_.device());
  group_.all_reduce(reduced, ReduceOp::kSum, "evaluation");
  sums = reduced.cpu();
  nats_and_count = sums.mutable_data_ptr<double>();
  double nats = 0, count = 0;
  for (std::int64_t j = 0; j < num_batches; ++j) {
    nats += nats_and_count[2 * j];
    count += nats_and_count[2 * j + 1];
  }
  Evaluation result;
  result.tokens = std::llround(count);
  result.bytes = std::llround(plan_.bytes);
  result.loss = nats / count;
  result.bits_per_byte = nats / std::numbers::ln2 / plan_.bytes;
  return result;
}

std::unique_ptr<Evaluator> make_evaluator(const configs::Config& config,
                                          const configs::Evaluate& what, const Corpus& corpus,
                                          Model& model, ProcessGroup& group) {
  LoaderOptions options;
  options.split = what.split();
  options.stream = config.task().language_model().stream();
  options.sequence_length = config.data().sequence_length();
  options.restart_at_documents = config.data().restart_at_documents();
  const auto reader = std::make_shared<EvalReader>(corpus, options);
  return std::make_unique<Evaluator>(
      model, group,
      plan_evaluation(corpus, what, options.stream, options.sequence_length, reader->num_windows()),
      [reader](std::int64_t begin, std::int64_t end) { return reader->read(begin, end); });
}

}  // namespace birkhoff
