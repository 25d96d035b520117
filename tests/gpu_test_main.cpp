// main() of GoogleTest programs with the label gpu: without a GPU they fail, in one line, and never
// skip.
#include <gtest/gtest.h>

#include <cstdio>

#include "cluster/base/error.h"
#include "cluster/base/gpu/device.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  try {
    birkhoff::cuda_device(0);
  } catch (const birkhoff::Error& error) {
    std::fprintf(stderr, "tests with the label gpu need one: %s\n", error.what());
    return 1;
  }
  return RUN_ALL_TESTS();
}
