#include "runtime/gradients/shard_reduction.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <numeric>

#include "cluster/base/error.h"

namespace birkhoff {

ShardReduction::ShardReduction(ProcessGroup& group, std::int64_t num_shards, at::Tensor gradients,
                               at::Tensor sums)
    : group_(group),
      num_shards_(num_shards),
      gradients_(std::move(gradients)),
      sums_(std::move(sums)),
      mine_(num_shards),
      slice_(num_shards) {
  hold_first_shard();
  const std::int64_t slice = gradients_.size(0) / group.size();
  const auto num_mine = static_cast<std::int64_t>(nodes_of_rank(group.rank()).size());
  for (int rank = 0; rank < group.size(); ++rank) {
    send_counts_.push_back(num_mine * slice);
    receive_counts_.push_back(static_cast<std::int64_t>(nodes_of_rank(rank).size()) * slice);
  }
}

std::vector<Interval> ShardReduction::nodes_of_rank(int rank) const {
  return nodes_of(shards_of_rank(rank), num_shards_);
}

void ShardReduction::hold_first_shard() {
  const Interval mine = shards_of_rank(group_.rank());
  in_gradients_ = {mine.begin, std::min(mine.begin + 1, mine.end)};
}

void ShardReduction::next_shard(bool one_pass) {
  const Interval next{in_gradients_.end, in_gradients_.end + 1};
  if (one_pass && are_halves(in_gradients_, next, num_shards_)) {
    in_gradients_.end = next.end;
    return;
  }
  mine_.add(in_gradients_, gradients_);
  gradients_.zero_();
  in_gradients_ = next;
}

at::Tensor ShardReduction::buffer(const std::vector<std::int64_t>& counts) const {
  return at::empty({std::accumulate(counts.begin(), counts.end(), std::int64_t{0})},
                   gradients_.options());
}

at::Tensor ShardReduction::slices_by_owner() const {
  const at::Tensor slices = buffer(send_counts_);
  const std::int64_t slice = gradients_.size(0) / group_.size();
  std::int64_t offset = 0;
  for (int owner = 0; owner < group_.size(); ++owner) {
    for (const at::Tensor& sum : mine_.sums()) {
      slices.narrow(0, offset, slice).copy_(sum.narrow(0, owner * slice, slice));
      offset += slice;
    }
  }
  return slices;
}

void ShardReduction::start(const std::string& name) {
  require(in_gradients_.end == shards_of_rank(group_.rank()).end,
          "a rank has computed all of its shards");
  if (mine_.sums().empty() && in_gradients_.size() > 0) {
    sent_ = gradients_;  // this rank's shards are one node
  } else {
    if (in_gradients_.size() > 0) mine_.add(in_gradients_, gradients_);
    if (group_.size() == 1) {
      sums_.copy_(mine_.sums().front());
    } else {
      sent_ = slices_by_owner();
    }
    mine_.clear();
  }
  hold_first_shard();
  if (group_.size() == 1) return;
  received_ = buffer(receive_counts_);
  work_ = group_.all_to_all_async(received_, receive_counts_, sent_, send_counts_, name);
}

void ShardReduction::combine(const std::string& name) {
  if (group_.size() == 1) return;
  work_->wait();
  const std::int64_t slice = gradients_.size(0) / group_.size();
  std::int64_t offset = 0;
  for (int rank = 0; rank < group_.size(); ++rank) {
    for (const Interval node : nodes_of_rank(rank)) {
      slice_.add(node, received_.narrow(0, offset, slice));
      offset += slice;
    }
  }
  const bool gathers = sums_.size(0) > slice;
  const at::Tensor mine = gathers ? sums_.narrow(0, group_.rank() * slice, slice) : sums_;
  mine.copy_(slice_.sums().front());
  slice_.clear();
  sent_.reset();
  received_.reset();
  work_ = gathers ? group_.all_gather_async(sums_, mine, name) : nullptr;
}

void ShardReduction::finish() {
  if (work_ != nullptr) work_->wait();
  work_ = nullptr;
}

}  // namespace birkhoff
