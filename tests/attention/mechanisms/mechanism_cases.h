// Every mechanism in every variant, found by walking the schema, and inputs for them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "attention/kernels/common/path.h"
#include "attention/mechanism.h"
#include "configs/schema/attention.pb.h"

namespace birkhoff::test {

constexpr std::int64_t kBlock = 4;
constexpr std::int64_t kTokens = 14;  // three blocks and a half

struct MechanismCase {
  std::string name;
  configs::Mechanism config;
  bool causal = false;
};
std::ostream& operator<<(std::ostream& out, const MechanismCase& mechanism_case);

// Each member of Mechanism's oneof, causal and not: with its defaults; with each other value of its
// enums, its bools, and its integers with the option `variant`; with a sink; and, if it takes them,
// with relative positions. Blocks have `block` tokens.
std::vector<MechanismCase> all_cases(std::int64_t block = kBlock);
// The name of a parameterized test.
inline std::string name_of(const ::testing::TestParamInfo<MechanismCase>& test) {
  return test.param.name;
}
// Those whose traits are chosen.
std::vector<MechanismCase> cases_where(bool (*chosen)(const MechanismCase&, const MechanismTraits&),
                                       std::int64_t block = kBlock);
inline bool is_causal(const MechanismCase&, const MechanismTraits& traits) { return traits.causal; }

// The config with all noise that its fields with the option `noise` add.
configs::Mechanism with_noise(configs::Mechanism config);
// Whether the case can be trained, with noise.
bool has_noise(const MechanismCase& each, const MechanismTraits& traits);

// A mechanism and its parameters, all drawn from N(0, 1/4), so that block weights are far from
// equal.
struct Built {
  Built(const configs::Mechanism& config, bool causal, at::ScalarType dtype,
        std::int64_t sequence_length = 32);
  Built(const configs::Mechanism& config, const MechanismShape& shape, at::ScalarType dtype);
  Parameters parameters;
  std::unique_ptr<Mechanism> mechanism;
  MechanismTraits traits;
};

// B = 2, H = 2, D = 3, C = 5, with the keys and values that `traits` ask for. q, k, v and x require
// gradients.
AttentionInput random_input(std::int64_t num_tokens, at::ScalarType dtype, std::uint64_t seed,
                            const MechanismTraits& traits = {});
// The same with only rows [first, first + count) of dim B.
AttentionInput batch_slice(const AttentionInput& in, std::int64_t first, std::int64_t count);
// The same with only tokens [first, first + count); values are copies that require gradients.
AttentionInput token_slice(const AttentionInput& in, std::int64_t first, std::int64_t count);
// The same with random tokens in [first, last).
AttentionInput replace_tokens(const AttentionInput& in, std::int64_t first, std::int64_t last,
                              std::uint64_t seed);

// The tensors for which a mechanism defines gradients: q, k, v, x and its parameters.
std::vector<at::Tensor> leaves(const AttentionInput& in, const Parameters& parameters);
// d (out . weights) / d leaf for each leaf; zeros if a leaf is unused. Weights are random,
// determined by `seed`.
std::vector<at::Tensor> gradients(const at::Tensor& out, const std::vector<at::Tensor>& leaves,
                                  std::uint64_t seed = 7);

at::Tensor run(const Mechanism& mechanism, const AttentionInput& in, Path path);

// Whether outputs of a path are equal bit for bit; on the reference of clusters up to the rounding
// of sums of kTokens numbers, whose order depends on the size of the largest cluster.
bool is_same(const at::Tensor& a, const at::Tensor& b, const MechanismTraits& traits, Path path);

double max_difference(const at::Tensor& a, const at::Tensor& b);
at::Tensor random_tensor(at::IntArrayRef shape, at::ScalarType dtype, std::uint64_t seed);

}  // namespace birkhoff::test
