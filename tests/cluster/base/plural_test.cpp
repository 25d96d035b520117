#include "cluster/base/text/plural.h"

#include <gtest/gtest.h>

namespace birkhoff {
namespace {

TEST(Counted, GivesTheNounTheFormOfTheNumber) {
  EXPECT_EQ(counted(0, "step"), "0 steps");
  EXPECT_EQ(counted(1, "step"), "1 step");
  EXPECT_EQ(counted(2, "step"), "2 steps");
  EXPECT_EQ(counted(-1, "step"), "-1 steps");
  EXPECT_EQ(counted(1234567, "document"), "1234567 documents");
}

TEST(Counted, TakesAnIrregularPlural) {
  EXPECT_EQ(counted(1, "entry", "entries"), "1 entry");
  EXPECT_EQ(counted(3, "entry", "entries"), "3 entries");
}

}  // namespace
}  // namespace birkhoff
