#include "runtime/gradients/grad_buckets.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "cluster/base/error.h"
#include "cluster/base/tensors/tensor_memory.h"

namespace birkhoff {
namespace {

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

// Runs when a backward pass has put a parameter's gradient into its slot.
class GradBuckets::ReadyHook : public torch::autograd::FunctionPostHook {
 public:
  ReadyHook(GradBuckets& buckets, std::size_t bucket) : buckets_(buckets), bucket_(bucket) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    buckets_.mark_ready(bucket_);
    return outputs;
  }

 private:
  GradBuckets& buckets_;
  const std::size_t bucket_;
};

// Runs before that, with ZeRO stages 2 and 3: the first gradient of a bucket brings its memory.
class GradBuckets::MemoryHook : public torch::autograd::FunctionPreHook {
 public:
  MemoryHook(GradBuckets& buckets, std::size_t bucket) : buckets_(buckets), bucket_(bucket) {}
  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& gradients) override {
    buckets_.take_zeros(buckets_.buckets_[bucket_].gradients);
    return gradients;
  }

 private:
  GradBuckets& buckets_;
  const std::size_t bucket_;
};

GradBuckets::GradBuckets(Parameters& parameters, ProcessGroup& group, std::int64_t bucket_elements,
                         std::int64_t num_shards, int zero_stage, std::optional<NodeGroups> nodes)
    : group_(group),
      parameters_(parameters),
      place_(parameters.place()),
      slice_group_(nodes ? *nodes->inside : group),
      copy_group_(nodes && nodes->across->size() > 1 ? nodes->across : nullptr),
      stage_(slice_group_.size() > 1 ? zero_stage : 0) {
  require(!nodes || num_shards == 0, "virtual shards have no nodes");
  require(bucket_elements > 0, "the bucket size is positive");
  std::vector<const Parameter*> divided, whole;
  for (auto parameter = parameters.list().rbegin(); parameter != parameters.list().rend();
       ++parameter) {
    (parameter->placement.is_whole() ? whole : divided).push_back(&*parameter);
  }
  add_buckets(divided, bucket_elements, /*divided=*/true);
  add_buckets(whole, bucket_elements, /*divided=*/false);
  missing_.resize(buckets_.size());
  running_.resize(buckets_.size());
  between_.resize(buckets_.size());
  added_.resize(buckets_.size());
  if (num_shards > 0) {
    for (const GradBucket& bucket : buckets_) {
      shard_reductions_.emplace_back(group_, num_shards, bucket.gradients, bucket.own_gradients);
    }
  }
  if (values_are_sliced()) {
    gathered_.emplace(slice_group_, buckets_, buckets_of_, memory_);
    parameters_.set_slices(this);
  }
}

GradBuckets::~GradBuckets() {
  // Parameters may outlive us; their accumulators must not call us then.
  for (const auto& accumulator : accumulators_) {
    auto* const node = static_cast<torch::autograd::Node*>(accumulator.get());
    node->post_hooks().clear();
    node->pre_hooks().clear();
  }
  if (gathered_) parameters_.set_slices(nullptr);
}

void GradBuckets::add_buckets(const std::vector<const Parameter*>& parameters,
                              std::int64_t bucket_elements, bool divided) {
  std::vector<const Parameter*> members;
  std::int64_t elements = 0;
  for (const Parameter* parameter : parameters) {
    if (!members.empty() && elements + parameter->value.numel() > bucket_elements) {
      add_bucket(members, divided);
      members.clear();
      elements = 0;
    }
    members.push_back(parameter);
    elements += parameter->value.numel();
  }
  if (!members.empty()) add_bucket(members, divided);
}

void GradBuckets::add_bucket(const std::vector<const Parameter*>& members, bool divided) {
  GradBucket bucket;
  bucket.divided = divided;
  std::int64_t end = 0;
  for (const Parameter* parameter : members) {
    const at::Tensor& value = parameter->value;
    bucket.slots.push_back({parameter->name, parameter->decay, value.sizes().vec(), end,
                            value.numel(), parameter->placement});
    end = round_up(end + value.numel(), GradBucket::kAlignment);
  }
  const std::int64_t length = round_up(end, GradBucket::kAlignment * group_.size());
  const std::int64_t slice = length / slice_group_.size();
  bucket.owned = sliced() ? Interval{slice_group_.rank() * slice, (slice_group_.rank() + 1) * slice}
                          : Interval{0, length};
  bucket.number = static_cast<int>(buckets_.size());
  keep_own(bucket, members.front()->value.options().requires_grad(false), length);
  for (std::size_t i = 0; i < members.size(); ++i) {
    const GradBucket::Slot& slot = bucket.slots[i];
    // The same tensor as the parameter: setting its data moves the parameter everywhere.
    at::Tensor value = members[i]->value;
    const at::Tensor place = bucket.values.narrow(0, slot.offset, slot.elements).view(slot.shape);
    copy_value(*members[i], slot, bucket);
    value.set_data(place);
    value.mutable_grad() = bucket.gradients.narrow(0, slot.offset, slot.elements).view(slot.shape);
    auto accumulator = torch::autograd::impl::grad_accumulator(value);
    require(accumulator != nullptr, "every parameter requires gradients");
    accumulator->add_post_hook(std::make_unique<ReadyHook>(*this, buckets_.size()));
    if (stage_ > 1) accumulator->add_pre_hook(std::make_unique<MemoryHook>(*this, buckets_.size()));
    accumulators_.push_back(std::move(accumulator));
    const auto unit = static_cast<std::size_t>(members[i]->unit);
    if (buckets_of_.size() <= unit) buckets_of_.resize(unit + 1);
    if (auto& of_unit = buckets_of_[unit]; of_unit.empty() || of_unit.back() != buckets_.size()) {
      of_unit.push_back(buckets_.size());
    }
  }
  if (values_are_sliced()) free_memory(bucket.values);
  if (stage_ > 1) free_memory(bucket.gradients);
  buckets_.push_back(std::move(bucket));
}

void GradBuckets::keep_own(GradBucket& bucket, const at::TensorOptions& options,
                           std::int64_t length) const {
  const Interval owned = bucket.owned;
  const auto make = [&](bool own_only, at::Tensor& all, at::Tensor& own) {
    if (own_only) {
      all = at::empty({length}, options);  // views need memory until they are made
      own = at::zeros({owned.size()}, options);
    } else {
      all = at::zeros({length}, options);
      own = all.narrow(0, owned.begin, owned.size());
    }
  };
  make(values_are_sliced(), bucket.values, bucket.own_values);
  make(stage_ > 1, bucket.gradients, bucket.own_gradients);
}

void GradBuckets::copy_value(const Parameter& parameter, const GradBucket::Slot& slot,
                             const GradBucket& bucket) const {
  const Interval kept = values_are_sliced() ? bucket.owned : Interval{0, bucket.elements()};
  const Interval range{std::max(kept.begin - slot.offset, std::int64_t{0}),
                       std::min(kept.end - slot.offset, slot.elements)};
  if (range.size() <= 0) return;
  const at::Tensor& to = values_are_sliced() ? bucket.own_values : bucket.values;
  const at::Tensor value = parameter.value.detach();
  to.narrow(0, slot.offset + range.begin - kept.begin, range.size())
      .copy_(has_memory(value) ? value.view({-1}).narrow(0, range.begin, range.size())
                               : parameters_.initial_values(parameter, range));
}

int GradBuckets::owner(const GradBucket& bucket, std::int64_t offset) const {
  const auto slice = static_cast<int>(offset / (bucket.elements() / slice_group_.size()));
  // Nodes take turns.
  return bucket.number % (group_.size() / slice_group_.size()) * slice_group_.size() + slice;
}

void GradBuckets::zero_gradients() {
  for (const GradBucket& bucket : buckets_) {
    (stage_ > 1 ? bucket.own_gradients : bucket.gradients).zero_();
  }
  if (stage_ > 1) free_gradients();
  first_pass_ = true;
}

void GradBuckets::next_shard(bool one_pass) {
  for (std::size_t i = 0; i < shard_reductions_.size(); ++i) {
    if (stage_ > 1) take_zeros(buckets_[i].gradients);
    shard_reductions_[i].next_shard(one_pass);
  }
}

void GradBuckets::begin_pass(bool last, bool discard) {
  if (gathered_) gathered_->begin_backward();
  discarding_ = discard;
  if (!last && !reduces_each_pass()) return;
  for (std::size_t i = 0; i < buckets_.size(); ++i) missing_[i] = buckets_[i].slots.size();
  reducing_ = true;
}

void GradBuckets::end_pass() {
  if (gathered_) gathered_->end_backward();
  if (!reduces_each_pass()) {
    if (discarding_) free_gradients();
    return;
  }
  while (num_launched_ < buckets_.size()) launch_next();
  while (num_retired_ < buckets_.size()) retire_next();
  num_launched_ = num_retired_ = 0;
  reducing_ = first_pass_ = false;
}

void GradBuckets::free_gradients() {
  for (const GradBucket& bucket : buckets_) memory_.free(bucket.gradients);
}

void GradBuckets::take_zeros(const at::Tensor& tensor) {
  if (has_memory(tensor)) return;
  memory_.take(tensor);
  tensor.zero_();
}

void GradBuckets::begin_use(const std::vector<int>& units) {
  launch_ready();  // a part that is recomputed: as in use_in_backward()
  gathered_->begin_use(units);
}

void GradBuckets::use_in_backward(const std::vector<int>& units) {
  // Ranks may finish the gradients of one part in another order. But all finish the same ones
  // before the part in front of it begins: all, or all but those that the part's last exchange
  // defers. So all send gradients and gather values in the same order.
  launch_ready();
  gathered_->use_in_backward(units);
}

void GradBuckets::mark_ready(std::size_t bucket) {
  if (!reducing_) return;
  require(missing_[bucket] > 0, "a parameter's gradient is complete only once in a pass");
  --missing_[bucket];
  if (!gathered_) launch_ready();
}

void GradBuckets::launch_ready() {
  if (!reducing_) return;
  // Buckets fill almost in order; an early one waits, so that the order is the same on all ranks.
  while (num_launched_ < buckets_.size() && missing_[num_launched_] == 0) launch_next();
}

void GradBuckets::launch_next() {
  // The one before goes on being reduced.
  while (stage_ > 1 && num_retired_ + 1 < num_launched_) retire_next();
  const std::size_t i = num_launched_++;
  const std::string name = fmt::format("gradients of bucket {}", i);
  const GradBucket& bucket = buckets_[i];
  if (stage_ > 1) take_zeros(bucket.gradients);
  if (discarding_) bucket.gradients.zero_();
  if (!shard_reductions_.empty()) {
    shard_reductions_[i].start(name);
  } else if (sliced()) {
    at::Tensor sums = bucket.own_gradients;
    if (reduces_each_pass() && !first_pass_) sums = added_[i] = at::empty_like(sums);
    running_[i] = slice_group_.reduce_scatter_async(sums, bucket.gradients, ReduceOp::kSum, name);
  } else if (group_.size() > 1) {
    running_[i] = group_.all_reduce_async(bucket.gradients, ReduceOp::kSum, name);
  }
}

void GradBuckets::retire_next() {
  const std::size_t i = num_retired_++;
  if (auto work = std::move(running_[i]); work != nullptr) work->wait();
  if (!shard_reductions_.empty()) {
    shard_reductions_[i].combine(fmt::format("gradient sums of bucket {}", i));
    if (stage_ > 1) shard_reductions_[i].finish();
  }
  if (stage_ > 1) memory_.free(buckets_[i].gradients);
  if (sliced() && copy_group_ != nullptr) {
    between_[i] =
        copy_group_->all_reduce_async(added_[i].defined() ? added_[i] : buckets_[i].own_gradients,
                                      ReduceOp::kSum, fmt::format("gradients of bucket {}", i));
  }
  if (i > 0) finish_sums(i - 1);
  if (i + 1 == buckets_.size()) finish_sums(i);
}

void GradBuckets::finish_sums(std::size_t bucket) {
  if (auto work = std::move(between_[bucket]); work != nullptr) work->wait();
  if (added_[bucket].defined()) buckets_[bucket].own_gradients.add_(added_[bucket]);
  added_[bucket].reset();
}

void GradBuckets::finish_reducing(const std::vector<at::Tensor>& sums) {
  if (!reduces_each_pass()) {
    while (num_launched_ < buckets_.size()) launch_next();
  }
  std::vector<std::unique_ptr<Work>> running_sums;
  for (const at::Tensor& tensor : sums) {
    if (group_.size() == 1 || tensor.numel() == 0) continue;
    running_sums.push_back(group_.all_reduce_async(tensor, ReduceOp::kSum, "sums of the step"));
  }
  while (num_retired_ < num_launched_) retire_next();
  num_launched_ = num_retired_ = 0;
  reducing_ = discarding_ = false;
  for (ShardReduction& reduction : shard_reductions_) reduction.finish();
  for (const auto& work : running_sums) work->wait();
  if (place_.tensor == nullptr) return;
  std::vector<std::unique_ptr<Work>> over_parts;
  for (const GradBucket& bucket : buckets_) {
    if (bucket.divided) continue;
    over_parts.push_back(place_.tensor->all_reduce_async(bucket.own_gradients, ReduceOp::kSum,
                                                         "gradients of whole parameters"));
  }
  for (const auto& work : over_parts) work->wait();
}

void GradBuckets::all_gather_parameters() {
  if (!sliced()) return;
  if (gathered_) return gathered_->forget();
  std::vector<std::unique_ptr<Work>> gathers;
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    const GradBucket& bucket = buckets_[i];
    gathers.push_back(slice_group_.all_gather_async(bucket.values, bucket.own_values,
                                                    fmt::format("values of bucket {}", i)));
  }
  for (auto& gather : gathers) gather->wait();
}

}  // namespace birkhoff
