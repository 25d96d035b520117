// Batches on their way to a GPU: each arrives whole, and none is overwritten while it is read.
#include "runtime/device_prefetcher.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <vector>

#include "cluster/base/gpu/device.h"

namespace birkhoff {
namespace {

// All numbers depend on the batch; rows are strided, like the loader's.
Batch batch_number(std::int64_t number) {
  const at::Tensor tokens = at::arange(33 * 1025, at::kLong).view({33, 1025}) + 1000000 * number;
  Batch batch;
  batch.fields["inputs"] = tokens.narrow(1, 0, 1024);
  batch.fields["targets"] = tokens.narrow(1, 1, 1024);
  batch.fields["mask"] = at::full({33, 1024}, number % 2, at::kByte);
  batch.sample_ids_B = at::arange(33, at::kLong) + number;
  return batch;
}

TEST(DevicePrefetcher, SmallBatchesArriveWholeAndStayUntilTheyAreRead) {
  const at::Device device = cuda_device(0);
  std::int64_t made = 0;
  DevicePrefetcher feed([&] { return batch_number(made++); }, device);
  const at::Tensor busy = at::randn({512, 512}, device);
  std::vector<Batch> copies;
  constexpr std::int64_t kBatches = 20;
  for (std::int64_t i = 0; i < kBatches; ++i) {
    const Batch batch = *feed.next();
    EXPECT_EQ(made, i + 1) << "by next(), or by the prefetch() before it";
    // The stream lags far behind the host when it reaches the copies.
    at::Tensor work = busy;
    for (int k = 0; k < 20; ++k) work = at::mm(work, busy) * 1e-2;
    Batch copy;
    for (const auto& [name, tensor] : batch.fields) copy.fields[name] = tensor.clone();
    copy.sample_ids_B = batch.sample_ids_B.clone();
    copies.push_back(copy);
    if (i % 3 != 0) {
      feed.prefetch();
      feed.prefetch();
      EXPECT_EQ(made, i + 2) << "one ahead";
    }
  }
  for (std::int64_t i = 0; i < kBatches; ++i) {
    const Batch expected = batch_number(i), actual = copies[static_cast<std::size_t>(i)];
    for (const auto& [name, tensor] : expected.fields) {
      EXPECT_TRUE(at::equal(actual.at(name).cpu(), tensor)) << "batch " << i << ", " << name;
    }
    EXPECT_TRUE(at::equal(actual.sample_ids_B.cpu(), expected.sample_ids_B)) << "batch " << i;
  }
}

}  // namespace
}  // namespace birkhoff
