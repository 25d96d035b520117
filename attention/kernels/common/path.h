// The path of an operation: its implementation. An operation takes a `limit` and chooses the
// fastest path up to it that fits dtype, shape and device. Where callers need to know which path
// will run, the operation declares its choice, choose_path(). A choice of a slower path says why; a
// PathRecord collects these reasons.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace birkhoff {

// From slow to fast. Results are the same up to rounding.
enum class Path {
  kReference,  // the specification: plain LibTorch operations, any device and floating dtype
  kSdpa,       // LibTorch's scaled_dot_product_attention; other operations: as kReference
  kFused,      // our kernels
};

// A choice and its reason.
struct PathChoice {
  Path path = Path::kReference;
  // Why no faster path or kernel takes the problem, to follow "because". Empty if nothing is
  // faster, or if the limit excludes it.
  std::string why{};

  operator Path() const { return path; }  // NOLINT(google-explicit-constructor)
};

// The kernels that a tensor's device has in this program.
enum class KernelDevice { kNone, kCpu, kGpu };
KernelDevice kernel_device(const at::Tensor& x);

// ---- Reasons. Each is empty if the kernels take the problem.

inline constexpr char kNoKernels[] = "this program has no kernels for the device";
// Of the kernels of x's device, from functions that return the reason of each.
template <typename OnCpu, typename OnGpu>
std::string why_not_fused(const at::Tensor& x, OnCpu on_cpu, OnGpu on_gpu) {
  switch (kernel_device(x)) {
    case KernelDevice::kCpu:
      return on_cpu();
    case KernelDevice::kGpu:
      return on_gpu();
    case KernelDevice::kNone:
      break;
  }
  return kNoKernels;
}
// kFused, or the reference for that reason.
inline PathChoice fused_unless(std::string why) {
  return {why.empty() ? Path::kFused : Path::kReference, std::move(why)};
}
inline constexpr char kTooManyRows[] = "batch, heads and tokens have too large a product";

// Of kernels that take the dtypes listed, for instance {at::kFloat, at::kBFloat16}.
std::string why_not_dtype(at::ScalarType dtype, std::initializer_list<at::ScalarType> taken);
// Of kernels for at most `most` channels a head.
std::string why_not_head_dim(std::int64_t head_dim, std::int64_t most);
// Of the CPU's tile kernels (cpu_dtype.h, limits.h).
std::string why_not_tiles(at::ScalarType dtype, std::int64_t head_dim);

// ---- Records.

// An operation's choice, and the caller that a PathCaller names.
struct PathTaken {
  std::string caller, operation;
  Path path = Path::kReference;
  std::string why;  // as in PathChoice

  bool operator==(const PathTaken&) const = default;
};
// Of one with a reason, without the caller: "block attention takes the reference path, because ..".
std::string describe(const PathTaken& taken);

// Collects the choices of the operations that this thread calls, each once per caller. At most one
// per thread at a time.
class PathRecord {
 public:
  PathRecord() : PathRecord(std::nullopt) {}
  // The operations get tensors on the meta device and choose as on `device`: the record shows what
  // a computation would do there. They return the reference's results, so that no kernel runs.
  explicit PathRecord(at::DeviceType device) : PathRecord(std::optional(device)) {}
  ~PathRecord();
  PathRecord(const PathRecord&) = delete;
  PathRecord& operator=(const PathRecord&) = delete;

  const std::vector<PathTaken>& taken() const { return taken_; }

 private:
  friend KernelDevice kernel_device(const at::Tensor& x);
  friend Path take_path(std::string_view operation, const PathChoice& choice);
  explicit PathRecord(std::optional<at::DeviceType> device);

  const std::optional<at::DeviceType> device_;
  std::vector<PathTaken> taken_;
};

// For operations: tells the thread's record, if there is one, of the choice, and returns the path
// to take.
Path take_path(std::string_view operation, const PathChoice& choice);

// While it exists, operations of this thread are called by `name`, which must outlive it.
class PathCaller {
 public:
  explicit PathCaller(std::string_view name);
  ~PathCaller();
  PathCaller(const PathCaller&) = delete;
  PathCaller& operator=(const PathCaller&) = delete;

 private:
  const std::string_view outer_;
};

}  // namespace birkhoff
