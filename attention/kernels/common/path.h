// How an operation is computed. An operation takes a `limit` and chooses the fastest path up to it
// that fits dtype, shape and device. Where callers need to know which path will run, the operation
// declares the function that it chooses with, choose_path().
#pragma once

namespace birkhoff {

// From slow to fast. Results are the same up to rounding.
enum class Path {
  kReference,  // the specification: plain LibTorch operations, any device and floating dtype
  kSdpa,       // LibTorch's scaled_dot_product_attention; other operations: as kReference
  kFused,      // our kernels
};

}  // namespace birkhoff
