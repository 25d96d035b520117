#include "cluster/base/text/number_text.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <limits>
#include <random>

namespace birkhoff {
namespace {

TEST(FixedText, HasNoSignedNaN) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(fixed_text(nan, 3), "nan");
  EXPECT_EQ(fixed_text(-nan, 3), "nan");
  EXPECT_EQ(fixed_text(std::numeric_limits<double>::infinity(), 3), "inf");
  EXPECT_EQ(fixed_text(-2.34567, 4), "-2.3457");
  EXPECT_EQ(fixed_text(2, 0), "2");
}

TEST(PlainText, NeedsNoExponentForOrdinaryNumbers) {
  EXPECT_EQ(plain_text(4e-4), "0.0004");
  EXPECT_EQ(plain_text(4e-4f), "0.0004");
  EXPECT_EQ(plain_text(1e-5), "0.00001");
  EXPECT_EQ(plain_text(0.0), "0");
  EXPECT_EQ(plain_text(2000.0), "2000");
  EXPECT_EQ(plain_text(-2.5), "-2.5");
  EXPECT_EQ(plain_text(1e20), "100000000000000000000");
  EXPECT_EQ(plain_text(1e300), "1e+300");
  EXPECT_EQ(plain_text(-std::numeric_limits<double>::quiet_NaN()), "nan");
}

TEST(PlainText, ReadsBackToTheSameBits) {
  std::mt19937_64 random(5);
  std::uniform_real_distribution<double> exponent(-320, 308), mantissa(-10, 10);
  for (int i = 0; i < 20000; ++i) {
    const double value = mantissa(random) * std::pow(10.0, exponent(random));
    EXPECT_EQ(std::strtod(plain_text(value).c_str(), nullptr), value);
    const auto single = static_cast<float>(value);
    if (std::isfinite(single)) {
      EXPECT_EQ(std::strtof(plain_text(single).c_str(), nullptr), single);
    }
  }
}

}  // namespace
}  // namespace birkhoff
