// Counts the FLOPs of this thread's matrix products, also on LibTorch's meta device: a clock for
// computation that is not carried out. Local.
#pragma once

#include <ATen/record_function.h>

namespace birkhoff {

class FlopCounter {
 public:
  // Counts until this object's end. One object per thread at a time.
  FlopCounter();
  ~FlopCounter();
  FlopCounter(const FlopCounter&) = delete;
  FlopCounter& operator=(const FlopCounter&) = delete;

  // 2 for a multiply-add.
  double flops() const;

 private:
  const at::CallbackHandle callback_;
};

}  // namespace birkhoff
