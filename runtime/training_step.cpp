#include "runtime/training_step.h"

#include <ATen/ops/isfinite.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "cluster/base/text/number_text.h"
#include "configs/config.pb.h"
#include "runtime/gradients/grad_norm.h"
#include "runtime/gradients/shard_tree.h"
#include "runtime/optimizers/schedule.h"

namespace birkhoff {
namespace {

// Columns of the step's statistics, sums that are reduced together with the gradients: one row per
// virtual shard, or one row if there are none.
enum Statistic : std::int64_t {
  kCount,      // counted targets
  kNats,       // their loss
  kStop,       // ranks that were asked to stop
  kNonFinite,  // from here on one element per rank: how many of its losses were not finite
};

}  // namespace

bool GradientSums::finite() const { return losses_finite() && std::isfinite(norm); }

std::string GradientSums::describe_non_finite() const {
  if (losses_finite())
    return fmt::format("gradient norm ({}) while all losses are finite", fixed_text(norm, 3));
  return fmt::format("loss of rank {}", fmt::join(ranks_not_finite, ", "));
}

TrainingStep::TrainingStep(const configs::Train& train, Model& model, ProcessGroup& group,
                           GradBuckets& buckets, Optimizer& optimizer, Activity* activity)
    : train_(train),
      model_(model),
      group_(group),
      buckets_(buckets),
      optimizer_(optimizer),
      activity_(activity),
      scalars_(group.device()),
      statistics_(at::zeros({std::max(1, train.invariant().shards()), kNonFinite + group.size()},
                            at::TensorOptions(at::kDouble).device(group.device()))),
      gradients_graph_(train.cuda_graph(), group.device()),
      // With slices the norm needs communication, which is not recorded.
      norm_graph_(train.cuda_graph() && !buckets.sliced(), group.device()),
      update_graph_(train.cuda_graph(), group.device()) {}

GradientSums TrainingStep::sum_gradients(const Batch& batch, std::int64_t step, double loss_scale,
                                         const StepHooks& hooks) {
  // Forward, backward.
  scalars_.set_noise_step(step);
  scalars_.set(StepScalars::kLossScale, loss_scale);
  scalars_.publish();
  batch_ = &batch;
  hooks_ = &hooks;
  gradients_graph_.run([this] { compute_gradients(); });
  if (hooks.launched) hooks.launched();

  // Reduce: sums of gradients and counts over all ranks, the same bits on each.
  if (hooks.asks_to_stop && hooks.asks_to_stop()) statistics_[0][kStop].fill_(1);
  buckets_.finish_reducing(statistics_);
  norm_graph_.run([this] { chunk_sums_ = gradient_chunk_sums(buckets_); });
  const at::Tensor sums_on_host = reduced_statistics();
  const double* statistics = sums_on_host.const_data_ptr<double>();
  GradientSums sums;
  sums.num_tokens = std::llround(statistics[kCount]);
  sums.count = std::max(statistics[kCount], 1.0);
  sums.nats = statistics[kNats];
  sums.stop_requested = statistics[kStop] > 0;
  sums.norm = norm_of_chunk_sums(buckets_, chunk_sums_) / sums.count / loss_scale;
  for (int rank = 0; rank < group_.size(); ++rank) {
    // A NaN sum counts too: it is not 0.
    if (statistics[kNonFinite + rank] != 0) sums.ranks_not_finite.push_back(rank);
  }
  return sums;
}

double TrainingStep::update(const GradientSums& sums, std::int64_t step, double loss_scale) {
  // Clip: one factor divides by count and loss scale and bounds the norm of the mean gradient.
  const bool clipped = train_.clip_norm() > 0 && sums.norm > train_.clip_norm();
  const double clip_factor = clipped ? train_.clip_norm() / sums.norm : 1.0;

  // Update: with kApply 0 parameters and optimizer state stay as they are.
  const double rate = learning_rate(train_.schedule(), step, train_.steps());
  scalars_.set(StepScalars::kLearningRate, rate);
  scalars_.set(StepScalars::kGradientScale, clip_factor / sums.count / loss_scale);
  scalars_.set(StepScalars::kApply, sums.finite() ? 1 : 0);
  scalars_.publish();
  update_graph_.run([this] { optimizer_.step(scalars_); });
  buckets_.all_gather_parameters();
  return rate;
}

void TrainingStep::compute_gradients() {
  const Batch& batch = *batch_;
  const std::int64_t micro_batch = train_.micro_batch() > 0 ? train_.micro_batch() : batch.size();
  buckets_.zero_gradients();
  statistics_.zero_();
  // This rank's sequences, cut into micro-batches.
  for (const ShardRows& shard : shards_of_batch(batch.size())) {
    if (shard.rows.begin > 0) {
      buckets_.next_shard(/*one_pass=*/shard.rows.size() <= micro_batch);
    }
    for (std::int64_t begin = shard.rows.begin; begin < shard.rows.end; begin += micro_batch) {
      const std::int64_t end = std::min(begin + micro_batch, shard.rows.end);
      const Batch micro = batch.narrow(begin, end);

      // Forward: the loss is a sum, so sums over micro-batches and ranks need no weights.
      const NoiseKey noise{train_.seed(), scalars_.noise_step(), 0, micro.sample_ids_B};
      const LossSums sums = model_.loss_sums(micro, noise);
      add_to_statistics(shard.statistics_row, sums);
      if (hooks_->forward_done) hooks_->forward_done();

      // Backward: gradients add up in the buckets; in the last pass each full bucket is reduced at
      // once. A graph sends nothing: finish_reducing() does it.
      if (end == batch.size() && !train_.cuda_graph()) buckets_.start_reducing();
      sums.loss.backward(scalars_.loss_scale(sums.loss.scalar_type()));
      if (activity_ != nullptr) activity_->tick();
      if (hooks_->backward_done) hooks_->backward_done();
    }
  }
}

std::vector<TrainingStep::ShardRows> TrainingStep::shards_of_batch(std::int64_t batch_size) const {
  const std::int64_t num_shards = train_.invariant().shards();
  if (num_shards == 0) return {{{0, batch_size}, 0}};
  std::vector<ShardRows> shards;
  const Interval mine = partition(num_shards, group_.rank(), group_.size());
  const std::int64_t first = partition(train_.global_batch(), mine.begin, num_shards).begin;
  for (std::int64_t shard = mine.begin; shard < mine.end; ++shard) {
    const Interval places = partition(train_.global_batch(), shard, num_shards);
    shards.push_back({{places.begin - first, places.end - first}, shard});
  }
  return shards;
}

void TrainingStep::add_to_statistics(std::int64_t number, const LossSums& sums) {
  const at::Tensor row = statistics_[number];
  row[kCount] += sums.count;
  row[kNats] += sums.nats;
  row[kNonFinite + group_.rank()] += at::isfinite(sums.loss.detach()).logical_not();
}

// Adds the rows of virtual shards along the same tree as their gradients.
at::Tensor TrainingStep::reduced_statistics() const {
  ShardSum sum(statistics_.size(0));
  for (std::int64_t row = 0; row < statistics_.size(0); ++row)
    sum.add({row, row + 1}, statistics_[row]);
  return sum.sums().front().cpu();
}

}  // namespace birkhoff
