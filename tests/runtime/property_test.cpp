// Properties of gradient buckets, named parts and schedules over random shapes, sizes and ranks.
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <mutex>
#include <numbers>
#include <numeric>
#include <set>

#include "configs/schema/config.pb.h"
#include "runtime/checkpoint/tensor_part.h"
#include "runtime/gradients/grad_buckets.h"
#include "runtime/optimizers/schedule.h"
#include "tests/cluster/base/thread_group.h"

namespace birkhoff {
namespace {

using Shape = std::vector<std::int64_t>;

// An integer, so that sums are exact in any order.
double gradient_of(int rank, std::size_t parameter, std::int64_t element) {
  return static_cast<double>((rank + 1) * 1000 + static_cast<std::int64_t>(parameter) * 37 +
                             element % 101);
}

// On one rank: makes parameters of these shapes and their buckets, reduces made-up gradients, and
// returns what is wrong; empty if nothing is.
std::string bucket_defect(const std::vector<Shape>& shapes, std::int64_t bucket_elements,
                          ProcessGroup& group) {
  Parameters parameters(7, at::kDouble);
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    parameters.add("p" + std::to_string(i), shapes[i], Initializer::normal(1), true);
  }
  std::vector<at::Tensor> values;
  for (const Parameter& parameter : parameters.list())
    values.push_back(parameter.value.detach().clone());
  GradBuckets buckets(parameters, group, bucket_elements);
  buckets.zero_gradients();

  std::size_t next = shapes.size();  // slots are in reverse order
  for (const auto& bucket : buckets.buckets()) {
    if (bucket.elements() % (GradBucket::kAlignment * group.size()) != 0) return "a bucket's size";
    if (bucket.gradients.size(0) != bucket.elements()) return "gradients unlike values";
    std::int64_t end = 0, elements = 0;
    for (const auto& slot : bucket.slots) {
      if (next == 0 || slot.name != "p" + std::to_string(--next)) return "the order of slots";
      const Parameter& parameter = parameters.list()[next];
      if (slot.offset % GradBucket::kAlignment != 0 || slot.offset < end) return "a slot's offset";
      end = slot.offset + slot.elements;
      elements += slot.elements;
      if (slot.shape != shapes[next] || slot.elements != parameter.value.numel() ||
          end > bucket.elements()) {
        return "a slot's size";
      }
      if (parameter.value.data_ptr<double>() != bucket.values.data_ptr<double>() + slot.offset ||
          parameter.value.grad().data_ptr<double>() !=
              bucket.gradients.data_ptr<double>() + slot.offset) {
        return "a view";
      }
      if (!at::equal(parameter.value, values[next])) return "a value";
      const int first = buckets.owner(bucket, slot.offset), last = buckets.owner(bucket, end - 1);
      if (first < 0 || first > last || last >= group.size()) return "an owner";
    }
    if (bucket.slots.size() > 1 && elements > bucket_elements) return "too full a bucket";
  }
  if (next != 0) return "a parameter without a slot";

  for (std::size_t i = 0; i < shapes.size(); ++i) {
    double* gradient = parameters.list()[i].value.mutable_grad().data_ptr<double>();
    for (std::int64_t j = 0; j < values[i].numel(); ++j)
      gradient[j] = gradient_of(group.rank(), i, j);
  }
  at::Tensor tail = at::full({3}, group.rank() + 1.0, at::kDouble);
  buckets.begin_pass(/*last=*/true);
  buckets.finish_reducing({tail});
  if (tail[2].item<double>() != group.size() * (group.size() + 1) / 2.0) return "the tail's sum";
  for (const auto& bucket : buckets.buckets()) {
    std::int64_t at = 0;
    const double* gradients = bucket.gradients.const_data_ptr<double>();
    const double* padding = bucket.values.const_data_ptr<double>();
    for (const auto& slot : bucket.slots) {
      for (; at < slot.offset; ++at) {
        if (gradients[at] != 0 || padding[at] != 0) return "padding between slots";
      }
      const auto parameter = static_cast<std::size_t>(std::stoi(slot.name.substr(1)));
      for (; at < slot.offset + slot.elements; ++at) {
        double expected = 0;
        for (int rank = 0; rank < group.size(); ++rank)
          expected += gradient_of(rank, parameter, at - slot.offset);
        if (gradients[at] != expected) return "a sum";
      }
    }
    for (; at < bucket.elements(); ++at) {
      if (gradients[at] != 0 || padding[at] != 0) return "padding at the end";
    }
  }
  return "";
}

RC_GTEST_PROP(GradBucketsProperty, HoldEveryParameterOnceAndSumOverRanks, ()) {
  std::vector<Shape> shapes(*rc::gen::inRange<std::size_t>(1, 9));
  for (Shape& shape : shapes) {
    shape.resize(*rc::gen::inRange<std::size_t>(0, 4));
    for (std::int64_t& size : shape) size = *rc::gen::inRange<std::int64_t>(1, 14);
  }
  const auto bucket_elements = *rc::gen::inRange<std::int64_t>(1, 4000);
  const int size = *rc::gen::inRange(1, 5);
  std::mutex mutex;
  std::set<std::string> defects;
  run_ranks(size, [&](ProcessGroup& group) {
    const std::string defect = bucket_defect(shapes, bucket_elements, group);
    const std::lock_guard lock(mutex);
    defects.insert(defect);
  });
  RC_ASSERT(defects == std::set<std::string>{""});
}

// Sorted positions that cut [0, size] into up to three parts, some of them empty.
std::vector<std::int64_t> cuts(std::int64_t size) {
  std::vector<std::int64_t> at(*rc::gen::inRange<std::size_t>(0, 3));
  for (std::int64_t& place : at) place = *rc::gen::inRange<std::int64_t>(0, size + 1);
  at.push_back(0);
  at.push_back(size);
  std::sort(at.begin(), at.end());
  return at;
}

// How the ranks of some mesh hold a tensor: the boxes of a random grid, each cut into flat ranges.
std::vector<TensorRegion> spread(const Shape& shape) {
  std::vector<TensorRegion> boxes{{shape, {}, {}}};
  for (const std::int64_t size : shape) {
    std::vector<TensorRegion> finer;
    const std::vector<std::int64_t> at = cuts(size);
    for (const TensorRegion& box : boxes) {
      for (std::size_t i = 0; i + 1 < at.size(); ++i) {
        finer.push_back(box);
        finer.back().box_offset.push_back(at[i]);
        finer.back().box_size.push_back(at[i + 1] - at[i]);
      }
    }
    boxes = finer;
  }
  std::vector<TensorRegion> regions;
  for (TensorRegion region : boxes) {
    std::int64_t elements = 1;
    for (const std::int64_t size : region.box_size) elements *= size;
    const std::vector<std::int64_t> at = cuts(elements);
    for (std::size_t i = 0; i + 1 < at.size(); ++i) {
      region.flat_begin = at[i];
      region.flat_end = at[i + 1];
      regions.push_back(region);
    }
  }
  return regions;
}

RC_GTEST_PROP(TensorPartProperty, StateMovesFromAnyMeshToAnyOther, ()) {
  Shape shape(*rc::gen::inRange<std::size_t>(0, 4));
  for (std::int64_t& size : shape) size = *rc::gen::inRange<std::int64_t>(1, 9);
  const TensorRegion whole{
      shape, Shape(shape.size(), 0), shape, 0,
      std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>())};
  std::vector<std::int64_t> state(static_cast<std::size_t>(whole.flat_end));
  std::iota(state.begin(), state.end(), 0);
  // From the tensor to the first mesh's parts, to the second's, and back to a tensor.
  const std::vector<TensorRegion> first = spread(shape), second = spread(shape);
  using Values = std::vector<std::int64_t>;
  const auto read = [](const std::vector<TensorRegion>& from, const std::vector<Values>& held,
                       const TensorRegion& to) {
    Values values(static_cast<std::size_t>(to.num_elements()), -1);
    for (std::size_t i = 0; i < from.size(); ++i) {
      for_each_common_run(from[i], to, [&](const CommonRun& run) {
        for (std::int64_t j = 0; j < run.length; ++j) {
          std::int64_t& value = values[static_cast<std::size_t>(run.begin_b + j)];
          RC_ASSERT(value == -1);
          value = held[i][static_cast<std::size_t>(run.begin_a + j)];
        }
      });
    }
    return values;
  };
  std::vector<Values> on_first, on_second;
  for (const TensorRegion& region : first) {
    RC_ASSERT(region_defect(region).empty());
    on_first.push_back(read({whole}, {state}, region));
  }
  for (const TensorRegion& region : second) on_second.push_back(read(first, on_first, region));
  RC_ASSERT(read(second, on_second, whole) == state);
}

RC_GTEST_PROP(ScheduleProperty, IsContinuousBoundedAndEndsWhereItShould, ()) {
  configs::Schedule schedule;
  const auto num_steps = *rc::gen::inRange<std::int64_t>(2, 3000);
  const auto warmup = *rc::gen::inRange<std::int64_t>(0, num_steps);
  schedule.set_learning_rate(static_cast<float>(*rc::gen::inRange(1, 1000)) / 1000);
  schedule.set_final_learning_rate(schedule.learning_rate() *
                                   static_cast<float>(*rc::gen::inRange(0, 101)) / 100);
  schedule.set_warmup_steps(warmup);
  schedule.set_shape(*rc::gen::element(configs::Schedule::constant, configs::Schedule::cosine,
                                       configs::Schedule::rsqrt, configs::Schedule::rsqrt_decay));
  const double peak = schedule.learning_rate(), last = schedule.final_learning_rate();
  const double held = static_cast<double>(std::max<std::int64_t>(warmup, 1));
  const bool rises = schedule.shape() != configs::Schedule::rsqrt_decay;
  const auto rate = [&](std::int64_t step) {
    return learning_rate(schedule, step, num_steps, /*epoch=*/0);
  };
  // Steepest change in a step: the rise, the middle of the cosine, or the start of 1 / sqrt.
  double steepest = rises ? peak / held : 0;
  if (schedule.shape() == configs::Schedule::cosine) {
    steepest = std::max(
        steepest, std::numbers::pi / 2 * (peak - last) / static_cast<double>(num_steps - warmup));
  } else if (schedule.shape() != configs::Schedule::constant) {
    steepest = std::max(steepest, peak / (2 * held));
  }
  for (std::int64_t step = 1; step <= num_steps; ++step) {
    RC_ASSERT(rate(step) >= 0 && rate(step) <= peak);
    if (step == num_steps) break;
    const double change = rate(step + 1) - rate(step);
    RC_ASSERT(std::abs(change) <= steepest * (1 + 1e-9));
    RC_ASSERT((step < warmup ? change >= 0 : change <= 0));
  }
  if (warmup > 0) RC_ASSERT(rate(warmup) == peak);
  switch (schedule.shape()) {
    case configs::Schedule::constant:
      RC_ASSERT(rate(num_steps) == peak);
      break;
    case configs::Schedule::cosine:
      RC_ASSERT(std::abs(rate(num_steps) - last) <= 1e-12 * peak);
      break;
    case configs::Schedule::rsqrt:
    case configs::Schedule::rsqrt_decay:
      RC_ASSERT(std::abs(rate(num_steps) -
                         peak * std::sqrt(held / static_cast<double>(num_steps))) <= 1e-12 * peak);
      break;
    case configs::Schedule::step_decay:  // in optimizer_test.cpp
    case configs::Schedule::warmup_stable_decay:
      break;
  }
}

}  // namespace
}  // namespace birkhoff
