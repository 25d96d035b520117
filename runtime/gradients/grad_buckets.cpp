#include "runtime/gradients/grad_buckets.h"

#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "cluster/base/error.h"

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

GradBuckets::GradBuckets(Parameters& parameters, ProcessGroup& group, std::int64_t bucket_elements,
                         std::int64_t num_shards, int zero_stage)
    : group_(group), place_(parameters.place()), sliced_(zero_stage > 0 && group.size() > 1) {
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
  if (num_shards > 0) {
    for (Bucket& bucket : buckets_) {
      shard_reductions_.emplace_back(group_, num_shards, bucket.gradients, sliced_);
    }
  }
}

GradBuckets::~GradBuckets() {
  // Parameters may outlive us; their accumulators must not call us then.
  for (const auto& accumulator : accumulators_) {
    static_cast<torch::autograd::Node*>(accumulator.get())->post_hooks().clear();
  }
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
  Bucket bucket;
  bucket.divided = divided;
  std::int64_t end = 0;
  for (const Parameter* parameter : members) {
    const at::Tensor& value = parameter->value;
    bucket.slots.push_back({parameter->name, parameter->decay, value.sizes().vec(), end,
                            value.numel(), parameter->placement});
    end = round_up(end + value.numel(), kAlignment);
  }
  const std::int64_t length = round_up(end, kAlignment * group_.size());
  bucket.values = at::zeros({length}, members.front()->value.options().requires_grad(false));
  bucket.gradients = at::zeros_like(bucket.values);
  for (std::size_t i = 0; i < members.size(); ++i) {
    const Slot& slot = bucket.slots[i];
    // The same tensor as the parameter: setting its data moves the parameter everywhere.
    at::Tensor value = members[i]->value;
    const at::Tensor place = bucket.values.narrow(0, slot.offset, slot.elements).view(slot.shape);
    place.copy_(value.detach());
    value.set_data(place);
    value.mutable_grad() = bucket.gradients.narrow(0, slot.offset, slot.elements).view(slot.shape);
    auto accumulator = torch::autograd::impl::grad_accumulator(value);
    require(accumulator != nullptr, "every parameter requires gradients");
    accumulator->add_post_hook(std::make_unique<ReadyHook>(*this, buckets_.size()));
    accumulators_.push_back(std::move(accumulator));
  }
  buckets_.push_back(std::move(bucket));
}

int GradBuckets::owner(const Bucket& bucket, std::int64_t offset) const {
  return static_cast<int>(offset / (bucket.elements() / group_.size()));
}

Interval GradBuckets::owned(const Bucket& bucket) const {
  if (!sliced_) return {0, bucket.elements()};
  const std::int64_t slice = bucket.elements() / group_.size();
  return {group_.rank() * slice, (group_.rank() + 1) * slice};
}

void GradBuckets::zero_gradients() {
  for (Bucket& bucket : buckets_) bucket.gradients.zero_();
}

void GradBuckets::next_shard(bool one_pass) {
  for (ShardReduction& reduction : shard_reductions_) reduction.next_shard(one_pass);
}

void GradBuckets::start_reducing() {
  for (std::size_t i = 0; i < buckets_.size(); ++i) missing_[i] = buckets_[i].slots.size();
  reducing_ = true;
}

void GradBuckets::mark_ready(std::size_t bucket) {
  if (!reducing_) return;
  require(missing_[bucket] > 0, "a parameter's gradient is complete only once in a step");
  --missing_[bucket];
  // Buckets fill almost in order; an early one waits, so that the order is the same on all ranks.
  while (num_launched_ < buckets_.size() && missing_[num_launched_] == 0) launch_next();
}

void GradBuckets::launch_next() {
  const std::size_t i = num_launched_++;
  const std::string name = fmt::format("gradients of bucket {}", i);
  if (!shard_reductions_.empty()) {
    shard_reductions_[i].start(name);
  } else if (sliced_) {
    const at::Tensor& gradients = buckets_[i].gradients;
    const Interval mine = owned(buckets_[i]);
    running_[i] = group_.reduce_scatter_async(gradients.narrow(0, mine.begin, mine.size()),
                                              gradients, ReduceOp::kSum, name);
  } else if (group_.size() > 1) {
    running_[i] = group_.all_reduce_async(buckets_[i].gradients, ReduceOp::kSum, name);
  }
}

void GradBuckets::finish_reducing(const std::vector<at::Tensor>& sums) {
  reducing_ = false;
  while (num_launched_ < buckets_.size()) launch_next();
  num_launched_ = 0;
  std::vector<std::unique_ptr<Work>> running_sums;
  for (const at::Tensor& tensor : sums) {
    if (group_.size() == 1 || tensor.numel() == 0) continue;
    running_sums.push_back(group_.all_reduce_async(tensor, ReduceOp::kSum, "sums of the step"));
  }
  for (std::size_t i = 0; i < shard_reductions_.size(); ++i) {
    shard_reductions_[i].combine(fmt::format("gradient sums of bucket {}", i));
  }
  for (ShardReduction& reduction : shard_reductions_) reduction.finish();
  for (auto& work : running_) {
    if (work != nullptr) work->wait();
    work = nullptr;
  }
  for (const auto& work : running_sums) work->wait();
  if (place_.tensor == nullptr) return;
  std::vector<std::unique_ptr<Work>> over_parts;
  for (const Bucket& bucket : buckets_) {
    if (bucket.divided) continue;
    const Interval mine = owned(bucket);
    over_parts.push_back(
        place_.tensor->all_reduce_async(bucket.gradients.narrow(0, mine.begin, mine.size()),
                                        ReduceOp::kSum, "gradients of whole parameters"));
  }
  for (const auto& work : over_parts) work->wait();
}

void GradBuckets::all_gather_parameters() {
  if (!sliced_) return;
  std::vector<std::unique_ptr<Work>> gathers;
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    const at::Tensor& values = buckets_[i].values;
    const Interval mine = owned(buckets_[i]);
    gathers.push_back(group_.all_gather_async(values, values.narrow(0, mine.begin, mine.size()),
                                              fmt::format("values of bucket {}", i)));
  }
  for (auto& gather : gathers) gather->wait();
}

}  // namespace birkhoff
