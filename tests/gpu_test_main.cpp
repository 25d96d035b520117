// main() of GoogleTest programs with the label gpu. Without a GPU they fail with one line; they
// never skip.
#include <gtest/gtest.h>

#include <cstdio>

#include "cluster/base/error.h"
#include "cluster/base/gpu/device.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  try {
    birkhoff::cuda_device(0);
  } catch (const birkhoff::Error& error) {
    std::fprintf(stderr, "tests with the label gpu need a GPU: %s\n", error.what());
    return 1;
  }
  return RUN_ALL_TESTS();
}
