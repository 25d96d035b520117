// Images of the size of ImageNet 64 x 64, for corpora that measure: smooth areas of random colors
// with a little noise. Image i of a seed is a function of both numbers (Philox), so images can be
// made in any order and by any thread.
#pragma once

#include <cstdint>

namespace birkhoff::generated_images {

// The counts of the down-sampled ImageNet of Chrabaszcz et al. 2017 (arXiv:1707.08819).
inline constexpr std::int64_t kTrain = 1'281'167, kValid = 50'000, kClasses = 1000;
inline constexpr std::int64_t kSide = 64, kChannels = 3, kBytes = kSide * kSide * kChannels;

// Writes kBytes values: [kSide, kSide, kChannels].
void make_image(std::uint64_t seed, std::int64_t number, std::uint8_t* out);
// The class of that image, below kClasses.
std::uint16_t class_of(std::uint64_t seed, std::int64_t number);

}  // namespace birkhoff::generated_images
