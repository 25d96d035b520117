#include "launcher/plan/rank_state.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <memory>
#include <optional>
#include <set>

#include "data/batch/partition.h"
#include "launcher/measure/synthetic_training.h"
#include "models/meta_operations.h"
#include "models/model.h"
#include "models/parallel/token_slices.h"
#include "runtime/gradients/grad_norm.h"
#include "runtime/gradients/step_sums.h"
#include "runtime/optimizers/optimizer.h"
#include "runtime/run_checkpoints.h"
#include "runtime/tasks/task.h"
#include "runtime/training_step.h"

namespace birkhoff {
namespace {

// Of a mesh on the meta device, whose operations are counted.
struct CountedRanks {
  CountedRanks(const configs::Config& config, int num_ranks, std::vector<Exchange>& exchanges)
      : tensor_size(config.mesh().tensor()),
        data_size(num_ranks / tensor_size),
        rings(config.device() == configs::Config::cuda),
        data(node_ranks(config), at::kMeta, rings, &exchanges),
        tensor({.rank = 0, .size = tensor_size, .node_ranks = 1}, at::kMeta, rings, &exchanges,
               GroupKind::kReplica) {
    if (!has_node_slices(config.mesh())) return;
    const int in_node = config.mesh().ranks_per_node();
    inside.emplace(NodeRanks{.rank = 0, .size = in_node, .node_ranks = 1}, at::kMeta, rings,
                   &exchanges, GroupKind::kNode);
    across.emplace(NodeRanks{.rank = 0, .size = data_size / in_node, .node_ranks = 1}, at::kMeta,
                   rings, &exchanges, GroupKind::kNodes);
  }
  NodeRanks node_ranks(const configs::Config& config) const {
    return {
        .rank = 0, .size = data_size, .node_ranks = std::max(1, config.mesh().ranks_per_node())};
  }
  std::optional<NodeGroups> nodes() {
    if (!inside) return std::nullopt;
    return NodeGroups{&*inside, &*across};
  }

  const int tensor_size, data_size;
  const bool rings;
  ImitatedGroup data, tensor;
  std::optional<ImitatedGroup> inside, across;
};

// The objects of rank 0 that hold its state.
struct StatefulParts {
  StatefulParts(const configs::Config& config, std::int64_t vocabulary, CountedRanks& ranks)
      : model(make_model(config, vocabulary, {at::kMeta, &ranks.tensor})),
        buckets(model->parameters(), ranks.data, config.train().bucket_elements(),
                config.train().invariant().shards(), config.train().zero_stage(), ranks.nodes()),
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

// A forward pass over `rows` sequences. Returns the units in the order in which it uses them.
std::vector<std::vector<int>> forward_pass(const configs::Config& config, std::int64_t vocabulary,
                                           std::int64_t rows, Model& model) {
  ParameterSlices* const slices = model.parameters().slices();
  std::optional<UnitRecord> record;
  if (slices != nullptr) model.parameters().set_slices(&record.emplace(*slices));
  const MetaOperations operations;
  const at::NoGradGuard no_gradients;
  configs::Config of_pass = config;
  of_pass.mutable_train()->set_global_batch(static_cast<int>(rows));
  const Batch batch = make_task(of_pass)->synthetic_batch(vocabulary, at::kMeta);
  const NoiseKey noise{config.train().seed(), at::empty({1}, batch.sample_ids_B.options()), 0,
                       batch.sample_ids_B, batch.global_size};
  model.loss_sums(batch, noise);
  model.parameters().set_slices(slices);
  return record ? record->used : std::vector<std::vector<int>>();
}

// The exchanges between the ranks of a replica that `after` has and `before` has not.
std::vector<Exchange> replica_exchanges(const std::vector<Exchange>& before,
                                        const std::vector<Exchange>& after) {
  std::vector<Exchange> difference;
  for (Exchange each : after) {
    if (!each.in_replica) continue;
    for (const Exchange& then : before) {
      if (then.what == each.what && then.in_replica) each.add(then, -1);
    }
    difference.push_back(each);
  }
  return difference;
}

void add_exchange(std::vector<Exchange>& exchanges, const Exchange& more) {
  if (more.operations == 0) return;
  const auto found = std::ranges::find_if(exchanges, [&](const Exchange& each) {
    return each.what == more.what && each.in_replica == more.in_replica;
  });
  found == exchanges.end() ? exchanges.push_back(more) : found->add(more, 1);
}

// What the backward pass of a forward pass with these exchanges exchanges: gathered rows are
// summed, sums gathered, and the inputs of products gathered again.
// rings: as ImitatedGroup's.
void add_backward(const std::vector<Exchange>& forward, bool rings,
                  std::vector<Exchange>& exchanges) {
  for (Exchange each : forward) {
    const bool sums = each.what == kSummedRows;
    if (!sums && each.what != kProductRows && each.what != kGatheredRows) continue;
    if (each.what == kProductRows) add_exchange(exchanges, each);
    // Both directions send as many bytes. The input of a sum is as long as the output of a gather.
    const auto sent = static_cast<std::int64_t>(each.sent_bytes);
    each.bytes += sums ? -sent : sent;
    each.what = sums ? kGatheredRows : kSummedRows;
    each.ring_bytes = sums && rings ? each.sent_bytes : 0;
    add_exchange(exchanges, each);
  }
}

// What train.recompute adds: the forward pass of the layers once more.
void add_layers_again(const configs::Config& config, std::int64_t vocabulary, std::int64_t rows,
                      const std::vector<Exchange>& forward, std::vector<Exchange>& exchanges) {
  configs::Config without_layers = config;
  without_layers.mutable_model()->set_layers(0);
  without_layers.mutable_mesh()->set_zero_inside_nodes(false);
  std::vector<Exchange> rest;
  CountedRanks ranks(without_layers, config.mesh().tensor(), rest);
  forward_pass(without_layers, vocabulary, rows,
               *make_model(without_layers, vocabulary, {at::kMeta, &ranks.tensor}));
  for (const Exchange& each : replica_exchanges(rest, forward)) {
    if (each.what == kProductRows || each.what == kGatheredRows || each.what == kSummedRows) {
      add_exchange(exchanges, each);
    }
  }
}

// The communication of a forward and a backward pass. Returns the most memory that gathered values
// have in it, and the gradients of a unit and of the bucket that is being sent: ZeRO stages 2 and
// 3.
std::int64_t pass_over(const configs::Config& config, std::int64_t vocabulary, std::int64_t rows,
                       StatefulParts& parts, bool last, std::vector<Exchange>& exchanges) {
  Parameters& parameters = parts.model->parameters();
  std::vector<std::vector<int>> used;
  if (parameters.slices() != nullptr || parameters.place().tensor != nullptr) {
    const std::vector<Exchange> before = exchanges;
    used = forward_pass(config, vocabulary, rows, *parts.model);
    const std::vector<Exchange> forward = replica_exchanges(before, exchanges);
    add_backward(forward, config.device() == configs::Config::cuda, exchanges);
    if (config.train().recompute()) {
      add_layers_again(config, vocabulary, rows, forward, exchanges);
    }
  }
  if (!parts.buckets.passes_are_collective()) return 0;
  const auto bytes_of_values = [&] {
    std::int64_t bytes = 0;
    for (const GradBucket& bucket : parts.buckets.buckets()) {
      bytes += static_cast<std::int64_t>(bucket.values.storage().nbytes());
    }
    return bytes;
  };
  std::int64_t gathered = 0;
  parts.buckets.begin_pass(last);
  std::ranges::reverse(used);
  for (const std::vector<int>& units : used) {
    parameters.slices()->use_in_backward(units);
    gathered = std::max(gathered, bytes_of_values());
  }
  parts.buckets.end_pass();
  std::map<int, std::int64_t> of_units;
  for (const Parameter& parameter : parameters.list()) {
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
  CountedRanks ranks(config, num_ranks, state.exchanges);
  StatefulParts parts(config, vocabulary, ranks);
  std::vector<at::Tensor> values, gradients;
  for (const GradBucket& bucket : parts.buckets.buckets()) {
    values.insert(values.end(), {bucket.values, bucket.own_values});
    gradients.insert(gradients.end(), {bucket.gradients, bucket.own_gradients});
    if (ranks.data_size == 1 || ranks.rings) continue;
    auto received = static_cast<std::int64_t>(bucket.gradients.nbytes());
    // The sums of a node, and those of nodes.
    const NodeRanks nodes = ranks.node_ranks(config);
    if (nodes.two_levels()) received += 2 * received / nodes.node_ranks;
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
  const Interval mine = partition(num_shards, 0, ranks.data_size);
  for (std::int64_t shard = 1; shard < mine.size(); ++shard) {
    parts.buckets.next_shard(/*one_pass=*/false);
  }
  std::int64_t rows =
      rank_share(config.train().global_batch(), num_shards, 0, ranks.data_size).size();
  bool kept_gradients = false;
  const std::int64_t micro_batch =
      config.train().micro_batch() > 0 ? config.train().micro_batch() : rows;
  for (std::int64_t left = TrainingStep::num_passes(config.train(), ranks.data_size); left > 0;
       --left) {
    const std::int64_t of_pass = std::min(micro_batch, rows);
    state.passing_bytes =
        pass_over(config, vocabulary, of_pass, parts, /*last=*/left == 1, state.exchanges);
    // The sums of virtual shards need the gradients of all passes.
    kept_gradients |= parts.buckets.passes_are_collective() && num_shards > 0 && left > 1;
    rows = std::max<std::int64_t>(rows - of_pass, std::min<std::int64_t>(rows, 1));
  }
  if (kept_gradients) {
    for (const GradBucket& bucket : parts.buckets.buckets()) {
      state.passing_bytes += static_cast<std::int64_t>(bucket.gradients.nbytes());
    }
  }
  const StepSums sums(*parts.model, num_shards);
  parts.buckets.finish_reducing(sums.tensors());
  const at::Tensor chunk_sums = gradient_chunk_sums(parts.buckets);
  if (ranks.tensor_size > 1) {
    ranks.tensor.all_reduce(chunk_sums.narrow(0, 0, 1), ReduceOp::kSum, kGradientNorm);
  }
  if (num_ranks > 1) {
    ImitatedGroup world({.rank = 0, .size = num_ranks, .node_ranks = 1}, at::kCPU,
                        /*gathers_in_rings=*/false, &state.exchanges);
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
  whole.mutable_mesh()->set_tensor(1);
  whole.mutable_mesh()->set_ranks_per_node(0);
  whole.mutable_mesh()->set_zero_inside_nodes(false);
  std::vector<Exchange> unused;
  CountedRanks ranks(whole, num_ranks, unused);
  const StatefulParts parts(whole, vocabulary, ranks);
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
