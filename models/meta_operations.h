// Operations of LibTorch that our models use and whose versions for the meta device LibTorch has
// only in Python. That device has shapes and no values.
#pragma once

#include <torch/library.h>

namespace birkhoff {

// They exist, in all threads, as long as the object. One object at a time.
class MetaOperations {
 public:
  MetaOperations();

 private:
  torch::Library library_;
};

}  // namespace birkhoff
