#include "launcher/processes/restarts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace birkhoff {
namespace {

using testing::HasSubstr;

TEST(Restarts, OnlyWhereTheEndMayPass) {
  for (int code = 0; code <= 75; ++code) {
    std::string why;
    const bool may_pass = code == 1 || code == 6 || code == 7 || code == 8 || code == 10;
    EXPECT_EQ(Restarts(1).again(code, 0, why), may_pass) << code;
    EXPECT_EQ(why.empty(), code == 0 || code == 75) << code;
    why.clear();
    EXPECT_FALSE(Restarts(0).again(code, 0, why)) << code;
    EXPECT_EQ(why, "") << "nobody asked for restarts";
  }
}

TEST(Restarts, OftenWhileTheRunGetsOn) {
  Restarts restarts(2);
  std::string why;
  for (int step = 0; step < 100; step += 10) EXPECT_TRUE(restarts.again(7, step, why)) << step;
  EXPECT_THAT(why, HasSubstr("step 90 (restart 1 of 2 without a new checkpoint)"));
  EXPECT_TRUE(restarts.again(8, 90, why));
  EXPECT_THAT(why, HasSubstr("restart 2 of 2"));
  EXPECT_FALSE(restarts.again(7, 90, why));
  EXPECT_THAT(why, HasSubstr("no new checkpoint since step 90, after 2 restarts"));
}

}  // namespace
}  // namespace birkhoff
