#include "attention/kernels/common/path.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "attention/kernels/common/cpu_dtype.h"
#include "attention/kernels/common/limits.h"
#include "cluster/base/error.h"
#include "cluster/base/gpu/device.h"

namespace birkhoff {
namespace {

thread_local PathRecord* current_record = nullptr;
thread_local std::string_view current_caller;

std::string dtype_text(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return "fp32";
    case at::kDouble:
      return "fp64";
    case at::kBFloat16:
      return "bf16";
    case at::kHalf:
      return "fp16";
    default:
      return c10::toString(dtype);
  }
}

}  // namespace

KernelDevice kernel_device(const at::Tensor& x) {
  if (x.is_cpu()) return KernelDevice::kCpu;
  if (kHasGpuKernels && x.is_cuda()) return KernelDevice::kGpu;
  if (!x.is_meta() || current_record == nullptr) return KernelDevice::kNone;
  const std::optional<at::DeviceType>& device = current_record->device_;
  return device == at::kCPU    ? KernelDevice::kCpu
         : device == at::kCUDA ? KernelDevice::kGpu
                               : KernelDevice::kNone;
}

std::string why_not_dtype(at::ScalarType dtype, std::initializer_list<at::ScalarType> taken) {
  if (std::find(taken.begin(), taken.end(), dtype) != taken.end()) return "";
  std::vector<std::string> names;
  for (const at::ScalarType each : taken) names.push_back(dtype_text(each));
  return fmt::format("the dtype is {}, not {}", dtype_text(dtype), fmt::join(names, " or "));
}

std::string why_not_head_dim(std::int64_t head_dim, std::int64_t most) {
  if (head_dim <= most) return "";
  return fmt::format("a head has {} channels, more than {}", head_dim, most);
}

std::string why_not_tiles(at::ScalarType dtype, std::int64_t head_dim) {
  if (!has_tile_type(dtype)) {
    return why_not_dtype(dtype, {at::kFloat, at::kDouble, at::kBFloat16});
  }
  return why_not_head_dim(head_dim, kMaxTileHeadDim);
}

std::string describe(const PathTaken& taken) {
  const char* path = "";
  switch (taken.path) {
    case Path::kReference:
      path = "takes the reference path";
      break;
    case Path::kSdpa:
      path = "is LibTorch's";
      break;
    case Path::kFused:
      path = "takes a slower kernel";
      break;
  }
  return fmt::format("{} {}, because {}", taken.operation, path, taken.why);
}

PathRecord::PathRecord(std::optional<at::DeviceType> device) : device_(device) {
  require(current_record == nullptr, "a thread has one PathRecord at a time");
  current_record = this;
}

PathRecord::~PathRecord() { current_record = nullptr; }

Path take_path(std::string_view operation, const PathChoice& choice) {
  if (current_record == nullptr) return choice.path;
  std::vector<PathTaken>& all = current_record->taken_;
  PathTaken taken{.caller = std::string(current_caller),
                  .operation = std::string(operation),
                  .path = choice.path,
                  .why = choice.why};
  if (std::find(all.begin(), all.end(), taken) == all.end()) all.push_back(std::move(taken));
  return current_record->device_ ? Path::kReference : choice.path;
}

PathCaller::PathCaller(std::string_view name) : outer_(current_caller) { current_caller = name; }

PathCaller::~PathCaller() { current_caller = outer_; }

}  // namespace birkhoff
