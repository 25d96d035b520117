#include "launcher/plan/rank_state.h"

#include <algorithm>
#include <map>
#include <set>

#include "launcher/measure/flop_counter.h"
#include "launcher/measure/imitated_rank.h"
#include "models/meta_operations.h"
#include "runtime/run_checkpoints.h"

namespace birkhoff {
namespace {

// While it exists, notes the most memory that gathered values have (ZeRO stage 3).
class GatheredMemory final : public ParameterSlices {
 public:
  GatheredMemory(Parameters& parameters, const GradBuckets& buckets)
      : parameters_(parameters), slices_(parameters.slices()), buckets_(buckets) {
    if (slices_ != nullptr) parameters_.set_slices(this);
  }
  ~GatheredMemory() override { parameters_.set_slices(slices_); }
  GatheredMemory(const GatheredMemory&) = delete;
  GatheredMemory& operator=(const GatheredMemory&) = delete;

  void begin_use(const std::vector<int>& units) override {
    slices_->begin_use(units);
    look();
  }
  void end_use(const std::vector<int>& units) override { slices_->end_use(units); }
  void use_in_backward(const std::vector<int>& units) override {
    slices_->use_in_backward(units);
    look();
  }
  std::int64_t most_bytes() const { return most_bytes_; }

 private:
  void look() {
    std::int64_t bytes = 0;
    for (const GradBucket& bucket : buckets_.buckets()) {
      bytes += static_cast<std::int64_t>(bucket.values.storage().nbytes());
    }
    most_bytes_ = std::max(most_bytes_, bytes);
  }

  Parameters& parameters_;
  ParameterSlices* const slices_;
  const GradBuckets& buckets_;
  std::int64_t most_bytes_ = 0;
};

// The gradients that ZeRO stages 2 and 3 add during a pass: those of a unit and of the bucket that
// is being sent. Virtual shards, whose sums need the gradients of all passes, also keep those of
// all buckets.
std::int64_t passing_gradients(ImitatedRank& rank, bool keeps_gradients) {
  std::map<int, std::int64_t> of_units;
  for (const Parameter& parameter : rank.model().parameters().list()) {
    of_units[parameter.unit] += static_cast<std::int64_t>(parameter.value.nbytes());
  }
  std::int64_t of_unit = 0, of_bucket = 0, of_all = 0;
  for (const auto& [unit, bytes] : of_units) of_unit = std::max(of_unit, bytes);
  for (const GradBucket& bucket : rank.buckets().buckets()) {
    const auto bytes = static_cast<std::int64_t>(bucket.gradients.nbytes());
    of_bucket = std::max(of_bucket, bytes);
    of_all += bytes;
  }
  return of_unit + of_bucket + (keeps_gradients ? of_all : 0);
}

// A step in which ranks only communicate in their last pass, without the passes before it.
struct SilentPasses {
  configs::Config config;
  std::int64_t passes = 0;  // left out
};
SilentPasses leave_out_silent_passes(const configs::Config& config, int num_ranks) {
  const configs::Train& train = config.train();
  const int data_ranks = num_ranks / config.mesh().tensor();
  if (train.zero_stage() > 1 || config.mesh().tensor() > 1 || train.invariant().shards() > 0 ||
      train.micro_batch() == 0) {
    return {config};
  }
  const std::int64_t passes = TrainingStep::num_passes(train, train.global_batch(), data_ranks);
  if (passes < 2) return {config};
  SilentPasses silent{config, passes - 1};
  silent.config.mutable_train()->set_global_batch(train.micro_batch() * data_ranks);
  return silent;
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

RankState rank_state(const configs::Config& of_run, std::int64_t vocabulary, int num_ranks,
                     WithSchedule with_schedule) {
  RankState state;
  const SilentPasses silent = leave_out_silent_passes(of_run, num_ranks);
  const configs::Config& config = silent.config;
  const MetaOperations operations;
  const FlopCounter flops;
  StepRecorder recorder([&] { return flops.flops(); });
  const MeshShape shape = mesh_shape(config, num_ranks);
  ImitatedRank rank(config, vocabulary, num_ranks, at::kMeta, &recorder);
  std::vector<at::Tensor> values, gradients;
  for (const GradBucket& bucket : rank.buckets().buckets()) {
    values.insert(values.end(), {bucket.values, bucket.own_values});
    gradients.insert(gradients.end(), {bucket.gradients, bucket.own_gradients});
    const GroupShape& data = shape[static_cast<std::size_t>(GroupKind::kData)];
    if (data.ranks.size == 1 || data.on_gpus) continue;
    auto received = static_cast<std::int64_t>(bucket.gradients.nbytes());
    // The sums of a node, and those of nodes.
    if (data.ranks.two_levels()) received += 2 * received / data.ranks.node_ranks;
    state.exchange_bytes = std::max(state.exchange_bytes, received);
  }
  for (const Statistic& statistic : rank.model().parameters().statistics()) {
    values.push_back(statistic.value);
  }
  state.values_bytes = memory_bytes(values);
  state.gradients_bytes = memory_bytes(gradients);
  std::vector<at::Tensor> optimizer;
  for (const TensorPart& part : rank.optimizer().state()) optimizer.push_back(part.data);
  state.optimizer_bytes = memory_bytes(optimizer);

  const bool gathers = rank.buckets().passes_are_collective();
  if (with_schedule == WithSchedule::kNo && !gathers) return state;
  const GatheredMemory gathered(rank.model().parameters(), rank.buckets());
  recorder.restart();
  rank.take_step();
  state.schedule = recorder.finish();
  for (const StepPart part : {StepPart::kBackward, StepPart::kForward}) {
    state.schedule.events.insert(
        state.schedule.events.begin(),
        {.part = part, .amount = static_cast<double>(silent.passes) * state.schedule.amount(part)});
  }
  if (gathers) {
    const bool keeps_gradients =
        config.train().invariant().shards() > 0 &&
        TrainingStep::num_passes(config.train(), config.train().global_batch(),
                                 rank.num_data_ranks()) > 1;
    state.passing_bytes = gathered.most_bytes() + passing_gradients(rank, keeps_gradients);
  }
  return state;
}

SavedState saved_state(const configs::Config& config, std::int64_t vocabulary, int num_ranks) {
  // Without slices every rank lists all state, with the owners that slices would have.
  configs::Config whole = config;
  whole.mutable_train()->set_zero_stage(0);
  whole.mutable_mesh()->set_tensor(1);
  whole.mutable_mesh()->set_ranks_per_node(0);
  whole.mutable_mesh()->set_zero_inside_nodes(false);
  const MetaOperations operations;
  ImitatedRank rank(whole, vocabulary, num_ranks, at::kMeta);
  const std::vector<TensorPart> state =
      training_parts(rank.model(), rank.buckets(), rank.optimizer(), num_ranks);
  SavedState saved{.size = checkpoint_size(typical_header(config, vocabulary), state, num_ranks)};
  std::vector<std::int64_t> copies(static_cast<std::size_t>(num_ranks), 0);
  for (const TensorPart& part : state) {
    if (is_written(part)) copies[static_cast<std::size_t>(part.owner)] += staged_bytes(part);
  }
  saved.copy_bytes = *std::ranges::max_element(copies);
  return saved;
}

}  // namespace birkhoff
