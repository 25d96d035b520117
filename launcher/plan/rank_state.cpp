#include "launcher/plan/rank_state.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <memory>
#include <set>

#include "cluster/two_levels.h"
#include "launcher/measure/synthetic_training.h"
#include "models/meta_operations.h"
#include "models/model.h"
#include "runtime/gradients/grad_norm.h"
#include "runtime/gradients/step_sums.h"
#include "runtime/optimizers/optimizer.h"
#include "runtime/run_checkpoints.h"
#include "runtime/tasks/task.h"
#include "runtime/training_step.h"

namespace birkhoff {
namespace {

// Rank 0 of a group whose operations do nothing but count. `gathers_in_rings`: as NcclGroup;
// MpiGroup sends all slices directly.
class CountingGroup : public ProcessGroup {
 public:
  CountingGroup(int size, int node_ranks, at::Device device, bool gathers_in_rings,
                std::vector<Exchange>& exchanges)
      : ranks_{.rank = 0, .size = size, .node_ranks = std::max(1, node_ranks)},
        device_(device),
        rings_(gathers_in_rings),
        exchanges_(exchanges) {}
  const NodeRanks& ranks() const { return ranks_; }
  int rank() const override { return 0; }
  int size() const override { return ranks_.size; }
  at::Device device() const override { return device_; }

 protected:
  std::unique_ptr<Work> do_all_reduce(at::Tensor tensor, ReduceOp) override {
    if (ranks_.two_levels()) return count_levels(2 * static_cast<double>(tensor.nbytes()));
    const double half = share_of_others(tensor);  // then the sums are gathered
    return count(2 * half, rings_ ? half : 0);
  }
  std::unique_ptr<Work> do_reduce_scatter(at::Tensor, at::Tensor input, ReduceOp) override {
    if (ranks_.two_levels()) return count_levels(static_cast<double>(input.nbytes()));
    return count(share_of_others(input));
  }
  std::unique_ptr<Work> do_all_gather(at::Tensor output, at::Tensor) override {
    if (ranks_.two_levels()) return count_levels(static_cast<double>(output.nbytes()));
    const double sent = share_of_others(output);
    return count(sent, rings_ ? sent : 0);
  }
  std::unique_ptr<Work> do_all_to_all(at::Tensor, std::vector<std::int64_t>, at::Tensor input,
                                      std::vector<std::int64_t>) override {
    return count(share_of_others(input));
  }
  std::unique_ptr<Work> do_broadcast(at::Tensor tensor, int) override {
    return count(share_of_others(tensor));
  }
  std::unique_ptr<Work> do_barrier() override { return count(0); }

 private:
  double share_of_others(const at::Tensor& tensor) const {
    return static_cast<double>(tensor.nbytes()) * (size() - 1) / size();
  }

  std::unique_ptr<Work> count(double sent_bytes, double ring_bytes = 0) {
    Exchange& exchange = next_operation();
    exchange.sent_bytes += sent_bytes;
    exchange.ring_bytes += ring_bytes;
    return done_work();
  }

  // Of an exchange of this many bytes inside nodes, and of what a rank then owns between nodes.
  std::unique_ptr<Work> count_levels(double bytes) {
    const double ranks = ranks_.node_ranks, nodes = ranks_.nodes();
    const double inside = bytes * (ranks - 1) / ranks,
                 between = bytes / ranks * (nodes - 1) / nodes;
    Exchange& exchange = next_operation();
    exchange.sent_bytes += inside + between;
    exchange.inside_node_bytes += inside;
    exchange.between_nodes_bytes += between;
    return done_work();
  }

  // Counts the operation that is being started, and its input.
  Exchange& next_operation() {
    const OperationRing::Entry entry = ring().current();
    // The gradients of all buckets ("gradients of bucket 3") have one purpose.
    const std::string what = entry.name.substr(0, entry.name.find(" of bucket "));
    auto found = std::ranges::find(exchanges_, what, &Exchange::what);
    if (found == exchanges_.end()) {
      exchanges_.push_back({.what = what, .in_backward_pass = what == "gradients"});
      found = exchanges_.end() - 1;
    }
    ++found->operations;
    found->bytes += entry.bytes;
    return *found;
  }

  const NodeRanks ranks_;
  const at::Device device_;
  const bool rings_;
  std::vector<Exchange>& exchanges_;
};

// The objects of rank 0 that hold its state.
struct StatefulParts {
  StatefulParts(const configs::Config& config, std::int64_t vocabulary, ProcessGroup& group)
      : model(make_model(config, vocabulary, group.device())),
        buckets(model->parameters(), group, config.train().bucket_elements(),
                config.train().invariant().shards(), config.train().zero_stage()),
        optimizer(make_optimizer(config.train().optimizer(), buckets)) {}

  const std::unique_ptr<Model> model;
  GradBuckets buckets;
  const std::unique_ptr<Optimizer> optimizer;
};

// Records the units that a forward pass uses.
class UnitRecord final : public ParameterSlices {
 public:
  explicit UnitRecord(ParameterSlices& slices) : slices_(slices) {}
  void begin_use(const std::vector<int>& units) override {
    slices_.begin_use(units);
    used.push_back(units);
  }
  void end_use(const std::vector<int>& units) override { slices_.end_use(units); }
  void use_in_backward(const std::vector<int>& units) override { slices_.use_in_backward(units); }

  std::vector<std::vector<int>> used;

 private:
  ParameterSlices& slices_;
};

// The units in the order in which a forward pass uses them. Collective as the pass.
std::vector<std::vector<int>> units_used(const configs::Config& config, std::int64_t vocabulary,
                                         Model& model) {
  ParameterSlices* const slices = model.parameters().slices();
  if (slices == nullptr) return {};
  UnitRecord record(*slices);
  model.parameters().set_slices(&record);
  const MetaOperations operations;
  const at::NoGradGuard no_gradients;
  configs::Config one = config;
  one.mutable_train()->set_global_batch(1);
  model.loss_sums(make_task(one)->synthetic_batch(vocabulary, at::kMeta), std::nullopt);
  model.parameters().set_slices(slices);
  return record.used;
}

// The communication of a forward and a backward pass with ZeRO stages 2 and 3. Returns the most
// memory that gathered values have in it, and the gradients of a unit and of the bucket that is
// being sent.
std::int64_t pass_over(const configs::Config& config, std::int64_t vocabulary, StatefulParts& parts,
                       bool last) {
  if (!parts.buckets.passes_are_collective()) return 0;
  const auto bytes_of = [&](auto GradBucket::*tensor) {
    std::int64_t bytes = 0;
    for (const GradBucket& bucket : parts.buckets.buckets()) {
      bytes += static_cast<std::int64_t>((bucket.*tensor).storage().nbytes());
    }
    return bytes;
  };
  std::vector<std::vector<int>> used = units_used(config, vocabulary, *parts.model);
  std::int64_t gathered = 0;
  parts.buckets.begin_pass(last);
  std::ranges::reverse(used);
  for (const std::vector<int>& units : used) {
    parts.model->parameters().slices()->use_in_backward(units);
    gathered = std::max(gathered, bytes_of(&GradBucket::values));
  }
  parts.buckets.end_pass();
  std::map<int, std::int64_t> of_units;
  for (const Parameter& parameter : parts.model->parameters().list()) {
    of_units[parameter.unit] += static_cast<std::int64_t>(parameter.value.nbytes());
  }
  std::int64_t of_unit = 0, of_bucket = 0;
  for (const auto& [unit, bytes] : of_units) of_unit = std::max(of_unit, bytes);
  for (const GradBucket& bucket : parts.buckets.buckets()) {
    of_bucket = std::max(of_bucket, static_cast<std::int64_t>(bucket.gradients.nbytes()));
  }
  return gathered + of_unit + of_bucket;
}

CheckpointHeader typical_header(const configs::Config& config, std::int64_t vocabulary) {
  const std::string hash(32, '0');
  CheckpointHeader header;
  header.set_run(hash);
  *header.mutable_config() = config;
  header.set_step(config.train().steps());
  header.set_corpus(hash);
  header.set_vocabulary(vocabulary);
  return header;
}

}  // namespace

std::int64_t memory_bytes(const std::vector<at::Tensor>& tensors) {
  std::set<const c10::StorageImpl*> seen;
  std::int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) {
    if (seen.insert(tensor.storage().unsafeGetStorageImpl()).second) {
      bytes += static_cast<std::int64_t>(tensor.storage().nbytes());
    }
  }
  return bytes;
}

RankState rank_state(const configs::Config& config, std::int64_t vocabulary, int num_ranks) {
  RankState state;
  const bool is_gpu = config.device() == configs::Config::cuda;
  CountingGroup group(num_ranks, config.mesh().ranks_per_node(), at::kMeta, is_gpu,
                      state.exchanges);
  StatefulParts parts(config, vocabulary, group);
  std::vector<at::Tensor> values, gradients;
  for (const GradBucket& bucket : parts.buckets.buckets()) {
    values.insert(values.end(), {bucket.values, bucket.own_values});
    gradients.insert(gradients.end(), {bucket.gradients, bucket.own_gradients});
    if (num_ranks == 1 || is_gpu) continue;
    auto received = static_cast<std::int64_t>(bucket.gradients.nbytes());
    // The sums of a node, and those of nodes.
    const NodeRanks& ranks = group.ranks();
    if (ranks.two_levels()) received += 2 * received / ranks.node_ranks;
    state.exchange_bytes = std::max(state.exchange_bytes, received);
  }
  for (const Statistic& statistic : parts.model->parameters().statistics()) {
    values.push_back(statistic.value);
  }
  state.values_bytes = memory_bytes(values);
  state.gradients_bytes = memory_bytes(gradients);
  std::vector<at::Tensor> optimizer;
  for (const TensorPart& part : parts.optimizer->state()) optimizer.push_back(part.data);
  state.optimizer_bytes = memory_bytes(optimizer);

  // The communication of TrainingStep's two halves.
  const std::int64_t num_shards = config.train().invariant().shards();
  const Interval mine = partition(num_shards, 0, num_ranks);
  for (std::int64_t shard = 1; shard < mine.size(); ++shard) {
    parts.buckets.next_shard(/*one_pass=*/false);
  }
  for (std::int64_t left = TrainingStep::num_passes(config.train(), num_ranks); left > 0; --left) {
    state.passing_bytes = pass_over(config, vocabulary, parts, /*last=*/left == 1);
  }
  const StepSums sums(*parts.model, num_shards);
  parts.buckets.finish_reducing(sums.tensors());
  gradient_chunk_sums(parts.buckets);
  if (num_ranks > 1) {
    CountingGroup world(num_ranks, /*node_ranks=*/1, at::kCPU, /*gathers_in_rings=*/false,
                        state.exchanges);
    world.all_reduce(TrainingStep::blank_votes(num_ranks), ReduceOp::kSum,
                     TrainingStep::kVotesName);
  }
  parts.buckets.all_gather_parameters();
  return state;
}

SavedState saved_state(const configs::Config& config, std::int64_t vocabulary, int num_ranks) {
  // Without slices every rank lists all state, with the owners that slices would have.
  configs::Config whole = config;
  whole.mutable_train()->set_zero_stage(0);
  std::vector<Exchange> unused;
  CountingGroup group(num_ranks, /*node_ranks=*/1, at::kMeta, /*gathers_in_rings=*/false, unused);
  const StatefulParts parts(whole, vocabulary, group);
  const std::vector<TensorPart> state =
      training_parts(*parts.model, parts.buckets, *parts.optimizer, num_ranks);
  SavedState saved{.size = checkpoint_size(typical_header(config, vocabulary), state, num_ranks)};
  std::vector<std::int64_t> copies(static_cast<std::size_t>(num_ranks), 0);
  for (const TensorPart& part : state) {
    if (is_written(part)) copies[static_cast<std::size_t>(part.owner)] += staged_bytes(part);
  }
  saved.copy_bytes = *std::ranges::max_element(copies);
  return saved;
}

}  // namespace birkhoff
