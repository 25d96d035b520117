#include "runtime/training_step.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "cluster/base/error.h"
#include "cluster/base/text/number_text.h"
#include "configs/schema/config.pb.h"
#include "data/batch/partition.h"
#include "runtime/gradients/grad_norm.h"
#include "runtime/optimizers/schedule.h"

namespace birkhoff {
namespace {

// Rows of a rank's batch that form one virtual shard, or all of them, and their row of the step's
// sums.
struct ShardRows {
  Interval rows;
  std::int64_t sums_row = 0;
};

// Of a rank with this many rows.
std::vector<ShardRows> shards_of(const configs::Train& train, int rank, int num_ranks,
                                 std::int64_t num_rows) {
  const std::int64_t num_shards = train.invariant().shards();
  if (num_shards == 0) return {{{0, num_rows}, 0}};
  std::vector<ShardRows> shards;
  const Interval mine = partition(num_shards, rank, num_ranks);
  const std::int64_t first = partition(train.global_batch(), mine.begin, num_shards).begin;
  for (std::int64_t shard = mine.begin; shard < mine.end; ++shard) {
    const Interval places = partition(train.global_batch(), shard, num_shards);
    shards.push_back({{places.begin - first, places.end - first}, shard});
  }
  return shards;
}

std::int64_t rows_of_pass(const configs::Train& train, std::int64_t num_rows) {
  return train.micro_batch() > 0 ? train.micro_batch() : std::max<std::int64_t>(num_rows, 1);
}

std::int64_t passes_of(const configs::Train& train, const std::vector<ShardRows>& shards,
                       std::int64_t num_rows) {
  const std::int64_t rows = rows_of_pass(train, num_rows);
  std::int64_t passes = 0;
  for (const ShardRows& shard : shards) passes += (shard.rows.size() + rows - 1) / rows;
  return passes;
}

// A step on the meta device is only counted.
bool records(const configs::Train& train, const ProcessGroup& group) {
  return train.cuda_graph() && !group.device().is_meta();
}

}  // namespace

std::string GradientSums::describe_non_finite() const {
  if (!losses_finite()) return fmt::format("loss of rank {}", fmt::join(losses_not_finite, ", "));
  const std::string which = std::isfinite(norm)
                                ? fmt::format("of rank {}", fmt::join(norms_not_finite, ", "))
                                : fmt::format("({})", fixed_text(norm, 3));
  return fmt::format("gradient norm {} while all losses are finite", which);
}

TrainingStep::TrainingStep(const configs::Train& train, Model& model, ProcessGroup& group,
                           ProcessGroup& world, GradBuckets& buckets, Optimizer& optimizer,
                           Activity* activity, ProcessGroup* pass_group)
    : train_(train),
      model_(model),
      group_(group),
      world_(world),
      buckets_(buckets),
      optimizer_(optimizer),
      activity_(activity),
      pass_group_(pass_group),
      scalars_(group.device()),
      step_sums_(model, train.invariant().shards()),
      gradients_graph_(records(train, group), group.device()),
      // With slices the norm needs communication, which is not recorded.
      norm_graph_(records(train, group) && !buckets.sliced(), group.device()),
      update_graph_(records(train, group), group.device()) {
  require(!buckets.passes_are_collective() || pass_group != nullptr,
          "ranks whose passes communicate give up a step together");
}

void TrainingStep::launch_passes(const Batch& batch, std::int64_t step, double loss_scale,
                                 const StepHooks& hooks) {
  scalars_.set_noise_step(step);
  scalars_.set(StepScalars::kLossScale, loss_scale);
  scalars_.publish();
  batch_ = &batch;
  hooks_ = &hooks;
  abandoned_ = false;
  gives_up();
  gradients_graph_.run([this] { compute_gradients(); });
}

at::Tensor TrainingStep::next_past() const {
  return next_past_BNMC.empty() ? at::Tensor() : at::cat(next_past_BNMC);
}

at::Tensor TrainingStep::reduce() {
  buckets_.finish_reducing(step_sums_.tensors());
  norm_graph_.run([this] { chunk_sums_ = gradient_chunk_sums(buckets_); });
  return chunk_sums_;
}

GradientSums TrainingStep::sum_gradients(const Batch& batch, std::int64_t step, double loss_scale,
                                         const StepHooks& hooks) {
  launch_passes(batch, step, loss_scale, hooks);
  if (hooks.launched) hooks.launched();

  // Sums of gradients and counts over all ranks, the same bits on each.
  const bool stop_requested = hooks.asks_to_stop && hooks.asks_to_stop();
  reduce();
  StepSums::Total total = step_sums_.total();
  GradientSums sums;
  sums.num_tokens = std::llround(total.tokens);
  sums.has_targets = total.count > 0;
  sums.count = std::max(total.count, 1.0);
  sums.weight = sums.has_targets ? total.weight : 1.0;
  sums.nats = total.nats;
  sums.figures = std::move(total.figures);
  sums.norm = norm_of_chunk_sums(buckets_, chunk_sums_) / sums.weight / loss_scale;
  decide(total.finite, stop_requested, sums);
  return sums;
}

at::Tensor TrainingStep::blank_votes(int num_ranks) {
  return at::zeros({num_ranks, kNumVotes}, at::kLong);
}

void TrainingStep::decide(bool losses_finite, bool stop_requested, GradientSums& sums) const {
  const at::Tensor votes = blank_votes(world_.size());
  auto* all = votes.mutable_data_ptr<std::int64_t>();
  auto* mine = all + world_.rank() * kNumVotes;
  mine[kStop] = stop_requested;
  mine[kAbandoned] = abandoned_;
  mine[kLossNotFinite] = !losses_finite;
  mine[kNormNotFinite] = !std::isfinite(sums.norm);
  if (world_.size() > 1) world_.all_reduce(votes, ReduceOp::kSum, kVotesName);
  for (int rank = 0; rank < world_.size(); ++rank) {
    const auto* vote = all + rank * kNumVotes;
    sums.stop_requested |= vote[kStop] > 0;
    sums.abandoned |= vote[kAbandoned] > 0;
    if (vote[kLossNotFinite] > 0) sums.losses_not_finite.push_back(rank);
    if (vote[kNormNotFinite] > 0) sums.norms_not_finite.push_back(rank);
  }
}

bool TrainingStep::gives_up() {
  if (abandoned_ || !hooks_->gives_up) return abandoned_;
  abandoned_ = hooks_->gives_up();
  // A rank that went on alone would wait for the others in its first layer.
  if (pass_group_ != nullptr) abandoned_ = any_rank(*pass_group_, abandoned_, "giving up the step");
  return abandoned_;
}

double TrainingStep::update(const GradientSums& sums, std::int64_t step, std::int64_t epoch,
                            double loss_scale) {
  // Clip: one factor divides by weight and loss scale and bounds the norm of the mean gradient.
  const bool clipped = train_.clip_norm() > 0 && sums.norm > train_.clip_norm();
  const double clip_factor = clipped ? train_.clip_norm() / sums.norm : 1.0;

  // Update: with kApply 0 parameters and optimizer state stay as they are.
  const double rate = learning_rate(train_.schedule(), step, train_.steps(), epoch);
  scalars_.set(StepScalars::kLearningRate, rate);
  scalars_.set(StepScalars::kGradientScale, clip_factor / sums.weight / loss_scale);
  scalars_.set(StepScalars::kApply, sums.applies() ? 1 : 0);
  scalars_.publish();
  update_graph_.run([this] {
    optimizer_.step(scalars_);
    step_sums_.update_statistics(scalars_.on_device().select(0, StepScalars::kApply).gt(0));
  });
  buckets_.all_gather_parameters();
  return rate;
}

void TrainingStep::compute_gradients() {
  const std::int64_t num_rows = batch_->size();
  buckets_.zero_gradients();
  step_sums_.zero();
  next_past_BNMC.clear();
  const std::int64_t micro_batch = rows_of_pass(train_, num_rows);
  const std::vector<ShardRows> shards = shards_of(train_, group_.rank(), group_.size(), num_rows);
  if (buckets_.passes_are_collective()) {
    // The passes that this rank lacks to make as many as the others.
    // With batch_tokens each batch has a size of its own.
    const std::int64_t samples =
        train_.batch_tokens() > 0 ? batch_->global_size : train_.global_batch();
    std::int64_t lacking =
        num_passes(train_, samples, group_.size()) - passes_of(train_, shards, num_rows);
    for (; lacking > 0 && !gives_up(); --lacking) {
      run_pass({0, std::min(micro_batch, num_rows)}, /*last=*/false, /*sums_row=*/-1);
    }
  }
  // This rank's sequences, cut into micro-batches.
  for (const ShardRows& shard : shards) {
    if (shard.rows.begin > 0) {
      buckets_.next_shard(/*one_pass=*/shard.rows.size() <= micro_batch);
    }
    for (std::int64_t begin = shard.rows.begin; begin < shard.rows.end; begin += micro_batch) {
      if (!train_.cuda_graph() && gives_up()) break;
      const std::int64_t end = std::min(begin + micro_batch, shard.rows.end);
      run_pass({begin, end}, /*last=*/end == num_rows, shard.sums_row);
    }
  }
}

void TrainingStep::run_pass(Interval rows, bool last, std::int64_t sums_row) {
  const Batch micro = batch_->narrow(rows.begin, rows.end);

  // Forward: the loss is a sum, so sums over micro-batches and ranks need no weights.
  const NoiseKey noise{train_.seed(), scalars_.noise_step(), 0, micro.sample_ids_B,
                       micro.global_size};
  const LossSums sums = model_.loss_sums(micro, noise);
  if (sums_row >= 0) step_sums_.add(sums_row, sums);
  if (sums_row >= 0 && sums.past_BNMC.defined()) next_past_BNMC.push_back(sums.past_BNMC);
  if (hooks_->forward_done) hooks_->forward_done();

  // Backward: gradients add up in the buckets; in the last pass each full bucket is reduced at
  // once. A graph sends nothing: finish_reducing() does it.
  if (!train_.cuda_graph()) buckets_.begin_pass(last, /*discard=*/sums_row < 0);
  sums.loss.backward(scalars_.loss_scale(sums.loss.scalar_type()));
  if (!train_.cuda_graph()) buckets_.end_pass();
  if (activity_ != nullptr) activity_->tick();
  if (hooks_->backward_done) hooks_->backward_done();
}

std::int64_t TrainingStep::num_passes(const configs::Train& train, std::int64_t global_batch,
                                      int num_ranks) {
  std::int64_t most = 0;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const std::int64_t num_rows =
        rank_share(global_batch, train.invariant().shards(), rank, num_ranks).size();
    most = std::max(most, passes_of(train, shards_of(train, rank, num_ranks, num_rows), num_rows));
  }
  return most;
}

}  // namespace birkhoff
