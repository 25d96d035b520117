#include "runtime/gradients/grad_buckets.h"

#include <gtest/gtest.h>

#include "tests/cluster/base/thread_group.h"
#include "tests/runtime/toy_model.h"

namespace birkhoff {
namespace {

using test::toy_batch;
using test::ToyModel;

// Gradients of samples [begin, end) by plain autograd, in creation order; zeros if there is none.
std::vector<at::Tensor> plain_gradients(std::int64_t begin, std::int64_t end) {
  ToyModel model(at::kDouble, 0);
  if (begin < end) model.loss_sums(toy_batch(begin, end), std::nullopt).loss.backward();
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : model.parameters().list()) {
    const at::Tensor& gradient = parameter.value.grad();
    gradients.push_back(gradient.defined() ? gradient : at::zeros_like(parameter.value.detach()));
  }
  return gradients;
}

TEST(GradBuckets, ParametersAndGradientsAreViewsAtEqualOffsets) {
  ToyModel plain(at::kFloat), model(at::kFloat);
  const auto group = make_single_group();
  GradBuckets buckets(model.parameters(), *group, 100);
  std::vector<std::string> order;
  for (auto& bucket : buckets.buckets()) {
    EXPECT_EQ(bucket.elements() % GradBucket::kAlignment, 0);
    std::int64_t end = 0;
    for (const auto& slot : bucket.slots) {
      EXPECT_EQ(slot.offset % GradBucket::kAlignment, 0);
      EXPECT_GE(slot.offset, end);
      end = slot.offset + slot.elements;
      order.push_back(slot.name);
    }
    EXPECT_LE(end, bucket.elements());
  }
  EXPECT_EQ(order, (std::vector<std::string>{"output", "hidden.bias", "hidden.weight", "unused",
                                             "embedding"}));

  const auto& list = model.parameters().list();
  for (std::size_t i = 0; i < list.size(); ++i) {
    const auto& parameter = list[i];
    EXPECT_TRUE(at::equal(parameter.value, plain.parameters().list()[i].value)) << parameter.name;
    EXPECT_TRUE(parameter.value.is_leaf() && parameter.value.requires_grad());
    for (auto& bucket : buckets.buckets()) {
      for (const auto& slot : bucket.slots) {
        if (slot.name != parameter.name) continue;
        EXPECT_EQ(parameter.value.data_ptr<float>(), bucket.values.data_ptr<float>() + slot.offset);
        EXPECT_EQ(parameter.value.grad().data_ptr<float>(),
                  bucket.gradients.data_ptr<float>() + slot.offset);
      }
    }
  }
  // Backward keeps the gradients as views.
  const float* before = list[0].value.grad().data_ptr<float>();
  model.loss_sums(toy_batch(0, 4), std::nullopt).loss.backward();
  EXPECT_EQ(before, list[0].value.grad().data_ptr<float>());
  buckets.zero_gradients();
  EXPECT_EQ(list[0].value.grad().abs().sum().item<float>(), 0);
}

TEST(GradBuckets, LargeParametersGetTheirOwnBucketAndSmallOnesShare) {
  ToyModel model(at::kFloat);
  const auto group = make_single_group();
  EXPECT_EQ(GradBuckets(model.parameters(), *group, 1).buckets().size(), 5u);
  ToyModel other(at::kFloat);
  EXPECT_EQ(GradBuckets(other.parameters(), *group, 1 << 20).buckets().size(), 1u);
}

class GradBucketsRanks : public testing::TestWithParam<std::tuple<int, int>> {};
INSTANTIATE_TEST_SUITE_P(All, GradBucketsRanks,
                         testing::Combine(testing::Values(1, 2, 4),
                                          testing::Values(1, 90, 1 << 20)));

TEST_P(GradBucketsRanks, SumsOverRanksAndMicroBatches) {
  const auto [size, bucket_elements] = GetParam();
  const auto expected = plain_gradients(0, 4 * size);
  run_ranks(size, [&, bucket_elements = bucket_elements, size = size](ProcessGroup& group) {
    ToyModel model(at::kDouble, 0);
    GradBuckets buckets(model.parameters(), group, bucket_elements);
    for (const auto& bucket : buckets.buckets()) {
      EXPECT_EQ(bucket.elements() % (GradBucket::kAlignment * size), 0);
    }
    // The second step proves that zero_gradients() and the counting start over.
    for (int step = 0; step < 2; ++step) {
      buckets.zero_gradients();
      const std::int64_t first = 4 * group.rank();
      model.loss_sums(toy_batch(first, first + 2), std::nullopt).loss.backward();
      buckets.begin_pass(/*last=*/true);
      model.loss_sums(toy_batch(first + 2, first + 4), std::nullopt).loss.backward();
      at::Tensor tail = at::full({3}, group.rank() + 1.0, at::kDouble);
      buckets.finish_reducing({tail});
      EXPECT_EQ(tail[2].item<double>(), size * (size + 1) / 2);
      for (std::size_t i = 0; i < expected.size(); ++i) {
        const auto& parameter = model.parameters().list()[i];
        EXPECT_TRUE(at::allclose(parameter.value.grad(), expected[i], 1e-13, 1e-15))
            << parameter.name;
      }
    }
  });
}

TEST(GradBuckets, ReducesInOneOrderOnAllRanksAndDuringBackward) {
  std::vector<std::vector<std::string>> names(4);
  run_ranks(4, [&](ProcessGroup& group) {
    ToyModel model(at::kFloat);
    GradBuckets buckets(model.parameters(), group, 1);
    buckets.zero_gradients();
    // Rank 2 has no data at all, as with more ranks than samples.
    if (group.rank() != 2) {
      model.loss_sums(toy_batch(0, 2), std::nullopt).loss.backward();
      EXPECT_EQ(group.ring().total_operations(), 0);  // not the last micro-batch: nothing is sent
    }
    buckets.begin_pass(/*last=*/true);
    if (group.rank() == 3) {
      // Its gradients arrive in another order: the first parameter's first.
      const at::Tensor loss = model.loss_sums(toy_batch(0, 2), std::nullopt).loss;
      for (const auto& parameter : model.parameters().list()) {
        if (parameter.name == "unused") continue;
        loss.backward({}, /*retain_graph=*/true, false, at::TensorList(parameter.value));
      }
      EXPECT_EQ(group.ring().total_operations(), 3);  // all but "unused" and the one after it
    } else if (group.rank() != 2) {
      model.loss_sums(toy_batch(0, 2), std::nullopt).loss.backward();
    }
    buckets.finish_reducing({at::zeros({1}, at::kDouble)});
    for (const auto& entry : group.ring().entries()) names[group.rank()].push_back(entry.name);
  });
  EXPECT_EQ(names[0], (std::vector<std::string>{"gradients of bucket 0", "gradients of bucket 1",
                                                "gradients of bucket 2", "gradients of bucket 3",
                                                "gradients of bucket 4", "sums of the step"}));
  for (int rank = 1; rank < 4; ++rank) EXPECT_EQ(names[rank], names[0]);
}

TEST(GradBuckets, FullBucketsLeaveBeforeBackwardEnds) {
  run_ranks(2, [](ProcessGroup& group) {
    ToyModel model(at::kFloat);
    GradBuckets buckets(model.parameters(), group, 1);
    buckets.begin_pass(/*last=*/true);
    model.loss_sums(toy_batch(0, 2), std::nullopt).loss.backward();
    // Output, bias and hidden weight; "unused" never gets a gradient and delays the embedding after
    // it.
    EXPECT_EQ(group.ring().total_operations(), 3);
    buckets.finish_reducing({at::zeros({1}, at::kDouble)});
    EXPECT_EQ(group.ring().total_operations(), 6);
    for (const auto& parameter : model.parameters().list()) {
      if (parameter.name == "unused") {
        EXPECT_EQ(parameter.value.grad().abs().sum().item<float>(), 0);
      }
    }
  });
}

TEST(GradBuckets, OneRankCommunicatesNothing) {
  ToyModel model(at::kFloat);
  const auto group = make_single_group();
  GradBuckets buckets(model.parameters(), *group, 1);
  buckets.begin_pass(/*last=*/true);
  model.loss_sums(toy_batch(0, 2), std::nullopt).loss.backward();
  buckets.finish_reducing({at::zeros({1}, at::kDouble)});
  EXPECT_EQ(group->ring().total_operations(), 0);
}

TEST(GradBuckets, ParametersOutliveTheirBuckets) {
  ToyModel model(at::kFloat);
  // One graph is from before the buckets, one from after them.
  const auto sums = model.loss_sums(toy_batch(0, 2), std::nullopt);
  {
    const auto group = make_single_group();
    GradBuckets buckets(model.parameters(), *group, 1);
    buckets.begin_pass(/*last=*/true);
  }
  model.loss_sums(toy_batch(0, 2), std::nullopt).loss.backward();
  EXPECT_GT(model.parameters().list()[0].value.grad().abs().sum().item<float>(), 0);
}

}  // namespace
}  // namespace birkhoff
