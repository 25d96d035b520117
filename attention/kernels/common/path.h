// How an operation is computed. Each operation has one function choose_path(). The operation itself
// calls it, and so do callers that need to know which path will run. An operation takes a `limit`
// and chooses the fastest path up to it that fits dtype, shape and device.
#pragma once

namespace birkhoff {

// From slow to fast. Results are the same up to rounding.
enum class Path {
  kReference,  // the specification: plain LibTorch operations, any device and floating dtype
  kSdpa,       // LibTorch's scaled_dot_product_attention; other operations: as kReference
  kFused,      // our kernels
};

}  // namespace birkhoff
