#include "launcher/measure/imitated_rank.h"

#include <vector>

#include "cluster/base/error.h"
#include "cluster/base/gpu/device.h"
#include "data/batch/partition.h"
#include "launcher/measure/report.h"
#include "runtime/gradients/grad_norm.h"
#include "runtime/tasks/task.h"

namespace birkhoff {
namespace {

// As many sequences as the rank with the most has. Virtual shards are those of rank 0.
Batch batch_of_rank(const configs::Config& config, std::int64_t vocabulary, int num_data_ranks,
                    at::Device device) {
  const std::int64_t num_shards = config.train().invariant().shards();
  const Interval rows = rank_share(config.train().global_batch(), num_shards,
                                   num_shards > 0 ? 0 : num_data_ranks - 1, num_data_ranks);
  return make_task(config)->synthetic_batch(vocabulary, device).narrow(rows.begin, rows.end);
}

}  // namespace

ImitatedRank::ImitatedRank(const configs::Config& config, std::int64_t vocabulary, int num_ranks,
                           at::Device device, StepRecorder* recorder)
    : config_(config),
      recorder_(recorder),
      mesh_(mesh_shape(config, num_ranks), device, recorder),
      model_(make_model(config_, vocabulary, {device, &mesh_.tensor(), &mesh_.data()})),
      buckets_(model_->parameters(), mesh_.data(), config_.train().bucket_elements(),
               config_.train().invariant().shards(), config_.train().zero_stage(), mesh_.nodes()),
      optimizer_(make_optimizer(config_.train().optimizer(), buckets_)),
      step_(config_.train(), *model_, mesh_.data(), mesh_.world(), buckets_, *optimizer_,
            /*activity=*/nullptr, &mesh_.world()),
      batch_(batch_of_rank(config_, vocabulary, mesh_.data().size(), device)) {}

void ImitatedRank::take_step() {
  constexpr std::int64_t kStep = 1;
  const auto begin = [this](StepPart part) {
    if (recorder_ != nullptr) recorder_->begin(part);
  };
  StepHooks hooks{.launched = [&] { begin(StepPart::kUpdate); }};
  if (!config_.train().cuda_graph()) {  // a recorded pass calls nothing
    hooks.forward_done = [&] { begin(StepPart::kBackward); };
    hooks.backward_done = [&] { begin(StepPart::kForward); };
  }
  if (!mesh_.data().device().is_meta()) {
    const GradientSums sums = step_.sum_gradients(batch_, kStep, /*loss_scale=*/1, hooks);
    step_.update(sums, kStep, /*epoch=*/0, /*loss_scale=*/1);
    return;
  }
  // The values that decide about the update do not exist.
  step_.launch_passes(batch_, kStep, /*loss_scale=*/1, hooks);
  hooks.launched();
  const at::Tensor chunk_sums = step_.reduce();
  if (mesh_.tensor().size() > 1) {
    mesh_.tensor().all_reduce(chunk_sums.narrow(0, 0, 1), ReduceOp::kSum, kGradientNorm);
  }
  if (const int ranks = mesh_.world().size(); ranks > 1) {
    mesh_.world().all_reduce(TrainingStep::blank_votes(ranks), ReduceOp::kSum,
                             TrainingStep::kVotesName);
  }
  buckets_.all_gather_parameters();
}

StepSchedule measured_schedule(configs::Config config, std::int64_t vocabulary, int num_ranks,
                               at::Device device, int rounds) {
  configs::Train& train = *config.mutable_train();
  if (train.precision() == configs::Train::fp16) train.set_precision(configs::Train::bf16);
  // Steps that allocate memory, which later ones reuse, or are recorded.
  const int warm_up = train.cuda_graph() ? StepGraph::kWarmUpRuns + 1 : 2;
  StepRecorder recorder([device] {
    synchronize(device);
    return clock_seconds();
  });
  ImitatedRank rank(config, vocabulary, num_ranks, device, &recorder);
  std::vector<StepSchedule> steps;
  for (int round = -warm_up; round < rounds; ++round) {
    recorder.restart();
    rank.take_step();
    if (round >= 0) steps.push_back(recorder.finish());
  }
  StepSchedule schedule = steps.front();
  for (std::size_t i = 0; i < schedule.events.size(); ++i) {
    std::vector<double> amounts;
    for (const StepSchedule& step : steps) {
      require(step.events.size() == schedule.events.size(), "all steps have the same events");
      amounts.push_back(step.events[i].amount);
    }
    schedule.events[i].amount = median(amounts);
  }
  return schedule;
}

}  // namespace birkhoff
