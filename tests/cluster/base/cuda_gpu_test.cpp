// Handles, checks, and the reduction and noise kernels, on a GPU.
#include <ATen/ATen.h>
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "cluster/base/collectives/gpu_reduce_params.h"
#include "cluster/base/collectives/reduce.h"
#include "cluster/base/error.h"
#include "cluster/base/gpu/check.h"
#include "cluster/base/gpu/device.h"
#include "cluster/base/gpu/handles.h"
#include "cluster/base/random/philox.h"
#include "tests/kernel_error.h"

namespace birkhoff {
namespace {

TEST(CudaCheck, SmallErrorsNameCallReasonAndPlace) {
  EXPECT_NO_THROW(cuda_check(cudaSuccess, "cudaMalloc"));
  try {
    cuda_check(cudaErrorMemoryAllocation, "cudaMalloc");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kMemory);
    EXPECT_THAT(error.what(), testing::HasSubstr("cudaMalloc failed: cudaErrorMemoryAllocation"));
    EXPECT_THAT(error.what(), testing::HasSubstr("cuda_gpu_test.cpp"));
  }
}

// Not Small: compute-sanitizer would report the intended error.
TEST(CudaCheck, LaunchesReportTheLastError) {
  (void)cudaSetDevice(9999);
  EXPECT_THROW(cuda_check_launch(nullptr, std::source_location::current()), Error);
  EXPECT_NO_THROW(cuda_check_launch(nullptr, std::source_location::current()));
}

TEST(CudaCheck, SmallALaunchThatDoesNotFitSaysWhatToChange) {
  const auto why = [](std::int64_t blocks, std::size_t bytes) -> std::string {
    try {
      check_launch_fits(blocks, bytes, 99 << 10, std::source_location::current());
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kUsage);
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(why(std::int64_t{1} << 30, 99 << 10), "");
  EXPECT_THAT(why(1, (99 << 10) + 1),
              testing::HasSubstr("needs 100 KiB of shared memory for a block of threads, and this "
                                 "GPU has 99; use shorter attention blocks"));
  EXPECT_THAT(why(std::int64_t{1} << 31, 0), testing::HasSubstr("lower train.micro_batch"));
}

TEST(Device, SmallARankWithoutAGpuIsToldSo) {
  EXPECT_EQ(cuda_device(0), at::Device(at::kCUDA, 0));
  if (count_cuda_devices() == 1) {
    // A launcher may have given each rank its own.
    EXPECT_EQ(cuda_device(9999), at::Device(at::kCUDA, 0));
    return;
  }
  try {
    cuda_device(9999);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kUsage);
    EXPECT_THAT(error.what(), testing::HasSubstr("rank 9999 of this machine"));
  }
}

// Host -> device on one stream, device -> host on another, which waits for an event.
TEST(CudaEvent, SmallOrdersTwoStreams) {
  const CudaStream up(CudaStream::Priority::kNormal), down(CudaStream::Priority::kHigh);
  CudaEvent arrived, returned;
  EXPECT_TRUE(arrived.passed());  // never recorded
  const std::size_t num_bytes = std::size_t{1} << 22;
  const auto pinned = at::TensorOptions().dtype(at::kByte).pinned_memory(true);
  const at::Tensor sent = at::full({static_cast<std::int64_t>(num_bytes)}, 0x5a, pinned);
  const at::Tensor received = at::zeros({static_cast<std::int64_t>(num_bytes)}, pinned);
  const at::Tensor device = at::empty({static_cast<std::int64_t>(num_bytes)},
                                      at::TensorOptions().dtype(at::kByte).device(at::kCUDA));
  cuda_check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  cuda_check(cudaMemcpyAsync(device.mutable_data_ptr(), sent.const_data_ptr(), num_bytes,
                             cudaMemcpyHostToDevice, up.get()),
             "cudaMemcpyAsync");
  arrived.record(up.get());
  arrived.hold_back(down.get());
  cuda_check(cudaMemcpyAsync(received.mutable_data_ptr(), device.mutable_data_ptr(), num_bytes,
                             cudaMemcpyDeviceToHost, down.get()),
             "cudaMemcpyAsync");
  returned.record(down.get());
  cuda_check(cudaStreamSynchronize(down.get()), "cudaStreamSynchronize");
  EXPECT_TRUE(returned.passed());
  EXPECT_TRUE(at::equal(sent, received));
}

void check_reduction(std::int64_t count, int num_inputs, at::ScalarType dtype, ReduceOp op) {
  SCOPED_TRACE(fmt::format("{} x {} of {}, operation {}", num_inputs, count, c10::toString(dtype),
                           static_cast<int>(op)));
  at::Tensor inputs = (test_values({num_inputs, count}, num_inputs) * 1e6).to(dtype);
  if (count > 3 && dtype != at::kLong) {
    inputs[num_inputs - 1][3].fill_(std::numeric_limits<double>::quiet_NaN());
  }
  std::vector<const void*> rows;
  for (int r = 0; r < num_inputs; ++r) rows.push_back(inputs[r].const_data_ptr());
  const at::Tensor expected = at::empty({count}, dtype);
  reduce_in_order(op, dtype, rows, expected.mutable_data_ptr(), count);

  const at::Tensor on_device = inputs.cuda();
  launch_reduce({.op = op,
                 .dtype = kernel_dtype(on_device),
                 .inputs = on_device.const_data_ptr(),
                 .output = on_device.mutable_data_ptr(),  // the first row
                 .num_inputs = num_inputs,
                 .count = count},
                current_stream(on_device));
  const at::Tensor actual = on_device[0].cpu();
  if (dtype == at::kLong) {
    EXPECT_TRUE(at::equal(actual, expected));
  } else {
    EXPECT_TRUE(at::equal(actual.nan_to_num(7), expected.nan_to_num(7)));
    EXPECT_TRUE(at::equal(at::isnan(actual), at::isnan(expected)));
  }
}

constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kDouble, at::kBFloat16, at::kLong};
constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin};

TEST(ReduceKernel, SmallHasTheBitsOfTheHost) {
  for (const at::ScalarType dtype : kDtypes) {
    for (const ReduceOp op : kOps) {
      for (const int num_inputs : {1, 2, 3, 8}) {
        for (const std::int64_t count : {0, 1, 255, 257, 1500}) {
          check_reduction(count, num_inputs, dtype, op);
        }
      }
    }
  }
}

TEST(ReduceKernel, LargeHasTheBitsOfTheHost) {
  for (const at::ScalarType dtype : kDtypes) check_reduction(5000003, 5, dtype, ReduceOp::kSum);
}

NoiseKey noise_on(at::Device device, std::int64_t rows) {
  const at::Tensor ids = at::arange(rows, at::kLong) * 0x123456789ab + 3;
  return {.seed = 0xfedcba9876543210,
          .step = at::full({1}, 1234567890123, at::kLong).to(device),
          .layer = 77,
          .sample_ids_B = ids.to(device)};
}

void check_noise(std::int64_t rows, at::IntArrayRef inner) {
  SCOPED_TRACE(fmt::format("{} rows of {} elements", rows, c10::multiply_integers(inner)));
  const NoiseKey host = noise_on(at::kCPU, rows), device = noise_on(at::kCUDA, rows);
  const auto uniform = [&](const NoiseKey& key) {
    return philox_uniform(key, NoisePurpose::kAttentionDropout, inner, /*offset=*/5).cpu();
  };
  EXPECT_TRUE(at::equal(uniform(host), uniform(device)));
  std::vector<std::int64_t> shape{rows};
  shape.insert(shape.end(), inner.begin(), inner.end());
  const at::Tensor x = test_values(shape, 2);
  const auto dropped = [&](const NoiseKey& key, const at::Tensor& values) {
    return philox_dropout(values, 0.3f, key, NoisePurpose::kResidualDropout).cpu();
  };
  EXPECT_TRUE(at::equal(dropped(host, x), dropped(device, x.cuda())));
  const auto in_rows = [&](const NoiseKey& key) {
    return philox_dropout_rows(0.3f, key, NoisePurpose::kAttentionDropout, /*num_rows=*/3,
                               inner.back(), std::int64_t{1} << 31)
        .cpu();
  };
  EXPECT_TRUE(at::equal(in_rows(host), in_rows(device)));
  const auto gumbel = [&](const NoiseKey& key) {
    return philox_gumbel(key, NoisePurpose::kGumbel, inner).cpu();
  };
  EXPECT_TRUE(at::allclose(gumbel(host), gumbel(device), 1e-6, 1e-6));
}

TEST(PhiloxKernel, SmallHasTheBitsOfTheHost) {
  check_noise(0, {5});
  check_noise(1, {1});
  check_noise(3, {4, 4});
  check_noise(2, {1023});
  check_noise(5, {3, 7, 11});
}

TEST(PhiloxKernel, LargeHasTheBitsOfTheHost) {
  check_noise(9, {1000003});
  check_noise(64, {16, 1024});
}

}  // namespace
}  // namespace birkhoff
