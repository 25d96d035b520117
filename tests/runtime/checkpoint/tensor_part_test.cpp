// Intersections of parts against brute force over every element.
#include "runtime/checkpoint/tensor_part.h"

#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <map>
#include <random>

namespace birkhoff {
namespace {

using Sizes = std::vector<std::int64_t>;

// Position in the part's data of each global element (row-major in the global tensor) that it
// holds.
std::map<std::int64_t, std::int64_t> elements_of(const TensorRegion& region) {
  std::map<std::int64_t, std::int64_t> elements;
  for (std::int64_t flat = region.flat_begin; flat < region.flat_end; ++flat) {
    std::int64_t rest = flat, position = 0, stride = 1;
    for (std::size_t d = region.global_shape.size(); d-- > 0;) {
      position += (region.box_offset[d] + rest % region.box_size[d]) * stride;
      rest /= region.box_size[d];
      stride *= region.global_shape[d];
    }
    elements[position] = flat - region.flat_begin;
  }
  return elements;
}

TensorRegion random_region(const Sizes& shape, std::mt19937& random) {
  const auto below = [&](std::int64_t limit) {  // in [0, limit]
    return std::uniform_int_distribution<std::int64_t>(0, limit)(random);
  };
  TensorRegion region{shape, {}, {}, 0, 0};
  std::int64_t elements = 1;
  for (const std::int64_t size : shape) {
    const bool full =
        size == 0 || below(1) == 0;  // boxes that span a dimension take the merged path
    const std::int64_t offset = full ? 0 : below(size - 1);
    const bool empty = below(50) == 0;
    region.box_offset.push_back(offset);
    region.box_size.push_back(full ? size : empty ? 0 : 1 + below(size - offset - 1));
    elements *= region.box_size.back();
  }
  const bool full = below(2) == 0;
  region.flat_begin = full ? 0 : below(elements);
  region.flat_end = full ? elements : region.flat_begin + below(elements - region.flat_begin);
  return region;
}

TEST(TensorPart, CommonRunsAreTheIntersection) {
  std::mt19937 random(1);
  std::int64_t non_empty = 0;
  for (int round = 0; round < 20000; ++round) {
    Sizes shape(random() % 5);
    for (std::int64_t& size : shape) {
      size = random() % 50 == 0 ? 0 : 1 + static_cast<std::int64_t>(random() % 4);
    }
    const TensorRegion a = random_region(shape, random), b = random_region(shape, random);
    ASSERT_EQ(region_defect(a), "");
    const auto elements_a = elements_of(a), elements_b = elements_of(b);
    std::map<std::int64_t, std::int64_t> expected, actual;  // position in a to position in b
    for (const auto& [global, position] : elements_a) {
      if (const auto found = elements_b.find(global); found != elements_b.end()) {
        expected[position] = found->second;
      }
    }
    for_each_common_run(a, b, [&](const CommonRun& run) {
      ASSERT_GT(run.length, 0);
      for (std::int64_t i = 0; i < run.length; ++i) {
        ASSERT_TRUE(actual.emplace(run.begin_a + i, run.begin_b + i).second) << "twice";
      }
    });
    ASSERT_EQ(actual, expected) << "round " << round;
    non_empty += !expected.empty();
  }
  EXPECT_GT(non_empty, 5000);  // enough cases are not trivial
}

// Boxes of 2^40 runs, of which the flat ranges hold a few: a forged manifest must not take years.
TEST(TensorPart, HugeBoxesAreNotWalked) {
  const std::int64_t rows = std::int64_t{1} << 40;
  const auto column = [&](std::int64_t begin, std::int64_t end) {
    return TensorRegion{{rows, 2}, {0, 0}, {rows, 1}, begin, end};
  };
  const auto whole = [&](std::int64_t begin, std::int64_t end) {
    return TensorRegion{{rows, 2}, {0, 0}, {rows, 2}, begin, end};
  };
  for_each_common_run(column(0, 1), whole(2 * rows - 1, 2 * rows),
                      [](const CommonRun&) { ADD_FAILURE() << "nothing is common"; });
  std::map<std::int64_t, std::int64_t> common;
  for_each_common_run(column(rows / 2, rows / 2 + 3), whole(rows + 1, rows + 6),
                      [&](const CommonRun& run) {
                        ASSERT_EQ(run.length, 1);
                        common[run.begin_a] = run.begin_b;
                      });
  EXPECT_EQ(common, (std::map<std::int64_t, std::int64_t>{{1, 1}, {2, 3}}));
}

TEST(TensorPart, WholeTensorsMeetInOneRun) {
  const TensorRegion whole{{5, 4, 3}, {0, 0, 0}, {5, 4, 3}, 0, 60};
  int runs = 0;
  for_each_common_run(whole, whole, [&](const CommonRun& run) {
    ++runs;
    EXPECT_EQ(run.length, 60);
  });
  EXPECT_EQ(runs, 1);
}

TEST(TensorPart, DefectsAreNamed) {
  const std::int64_t big = std::int64_t{1} << 40;
  const std::vector<TensorRegion> bad = {
      {{2, 3}, {0}, {2, 3}, 0, 6},      // offsets for one dimension only
      {{2, 3}, {0, 0}, {2}, 0, 2},      // sizes for one dimension only
      {{-2}, {0}, {0}, 0, 0},           // negative size
      {{2, 3}, {-1, 0}, {2, 3}, 0, 6},  // negative offset
      {{2, 3}, {0, 0}, {2, -3}, 0, 0},  // negative box
      {{2, 3}, {0, 1}, {2, 3}, 0, 6},   // box leaves the tensor
      {{2, 3}, {0, 4}, {2, 0}, 0, 0},   // offset past the tensor
      {{2}, {INT64_MAX}, {INT64_MAX}, 0, 1},
      {{2, 3}, {0, 0}, {2, 3}, -1, 6},  // range before the box
      {{2, 3}, {0, 0}, {2, 3}, 4, 3},   // range backwards
      {{2, 3}, {0, 0}, {2, 2}, 0, 5},   // range past the box
      {{big, big}, {0, 0}, {big, big}, 0, 1},
      {{big, big}, {0, 0}, {1, 1}, 0, 1},
  };
  for (std::size_t i = 0; i < bad.size(); ++i) {
    EXPECT_NE(region_defect(bad[i]), "") << "case " << i;
  }
  EXPECT_EQ(region_defect({{}, {}, {}, 0, 1}), "");              // a scalar
  EXPECT_EQ(region_defect({{0, 3}, {0, 0}, {0, 3}, 0, 0}), "");  // a tensor without elements
}

TEST(TensorPart, WholePartIsAViewOfTheTensor) {
  const at::Tensor tensor = at::zeros({2, 3});
  const TensorPart part = whole_part("x", StateKind::kStatistic, tensor, 1);
  EXPECT_TRUE(part.region.is_whole());
  part.data.fill_(4);
  EXPECT_EQ(tensor.sum().item<float>(), 24);
  EXPECT_EQ(part.data.dim(), 1);
}

TEST(TensorPart, OwnersAreBalancedByBytes) {
  std::vector<TensorPart> parts;
  for (const std::int64_t size : {10, 70, 20, 40, 30, 0}) {
    parts.push_back(whole_part("x", StateKind::kParameter, at::zeros({size}), 0));
  }
  balance_owners(parts, 2);
  std::vector<std::int64_t> load(2, 0);
  for (const TensorPart& part : parts) {
    load[static_cast<std::size_t>(part.owner)] += part.data.numel();
  }
  EXPECT_EQ(load, (std::vector<std::int64_t>{90, 80}));
}

TEST(TensorPart, WithAsManyOwnersAsItemsEachHasOne) {
  EXPECT_EQ(balanced_owners({5, 9, 5, 1}, 4), (std::vector<int>{1, 0, 2, 3}));
  EXPECT_EQ(balanced_owners({5, 9, 5, 1}, 1), (std::vector<int>{0, 0, 0, 0}));
}

}  // namespace
}  // namespace birkhoff
