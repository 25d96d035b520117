// Dense attention over several tiles of queries and keys. The conformance tests cover short
// sequences.
#include "attention/mechanisms/dense/dense.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "attention/kernels/common/masked_softmax.h"
#include "tests/attention/mechanisms/mechanism_cases.h"

namespace birkhoff::test {
namespace {

constexpr std::int64_t kBatch = 2, kHeads = 3, kLength = 331, kHeadDim = 20;

struct DenseCase {
  bool causal, padded, packed;
  float dropout;
};

std::vector<DenseCase> dense_cases() {
  std::vector<DenseCase> cases;
  for (const bool causal : {false, true}) {
    for (int options = 0; options < 8; ++options) {
      cases.push_back({causal, (options & 1) != 0, (options & 2) != 0, options & 4 ? 0.25f : 0.0f});
    }
  }
  return cases;
}

class Dense : public ::testing::TestWithParam<DenseCase> {
 protected:
  static Built build(at::ScalarType dtype) {
    configs::Mechanism config;
    config.mutable_dense()->set_dropout(GetParam().dropout);
    return {config,
            {.channels = kHeads * kHeadDim,
             .heads = kHeads,
             .head_dim = kHeadDim,
             .sequence_length = kLength,
             .causal = GetParam().causal},
            dtype};
  }

  // Rounded to bf16, so that every dtype has the same numbers. Laid out as a layer does: views of
  // one tensor [B, L, 3, H, D].
  static AttentionInput input(at::ScalarType dtype) {
    const at::Tensor qkv =
        (2 * random_tensor({kBatch, kLength, 3, kHeads, kHeadDim}, at::kFloat, 1))
            .to(at::kBFloat16)
            .to(dtype)
            .permute({2, 0, 3, 1, 4});
    AttentionInput in;
    in.q_BHLD = qkv[0].detach().requires_grad_();
    in.k_BHSD = qkv[1].detach().requires_grad_();
    in.v_BHSD = qkv[2].detach().requires_grad_();
    in.x_q_BLC = in.x_kv_BSC = at::zeros({kBatch, kLength, kHeads * kHeadDim}, in.q_BHLD.options());
    if (GetParam().padded) in.key_lengths_B = at::tensor({kLength - 3, std::int64_t{130}});
    if (GetParam().packed) {
      const at::Tensor token = at::arange(kLength);
      in.segments_q_BL = in.segments_kv_BS =
          at::stack({(token >= 64).to(at::kInt), (token >= 200).to(at::kInt) + 5});
    }
    if (GetParam().dropout > 0) {
      in.noise = NoiseKey{.seed = 9,
                          .step = at::full({1}, 4, at::kLong),
                          .layer = 1,
                          .sample_ids_B = at::arange(kBatch) + 7};
    }
    return in;
  }

  // Returns out, then the gradients of q, k and v.
  static std::vector<at::Tensor> solve(at::ScalarType dtype, Path path) {
    const Built built = build(dtype);
    const AttentionInput in = input(dtype);
    const at::Tensor out = run(*built.mechanism, in, path);
    std::vector<at::Tensor> results = gradients(out, {in.q_BHLD, in.k_BHSD, in.v_BHSD});
    results.insert(results.begin(), out.detach());
    return results;
  }
};
INSTANTIATE_TEST_SUITE_P(All, Dense, ::testing::ValuesIn(dense_cases()), [](const auto& named) {
  const DenseCase& each = named.param;
  return std::string(each.causal ? "Causal" : "Encoder") + (each.padded ? "Padded" : "") +
         (each.packed ? "Packed" : "") + (each.dropout > 0 ? "Dropout" : "");
});

TEST_P(Dense, Fp64EqualsTheReference) {
  const auto exact = solve(at::kDouble, Path::kReference), ours = solve(at::kDouble, Path::kFused);
  for (std::size_t i = 0; i < exact.size(); ++i) {
    EXPECT_LE(max_difference(ours[i], exact[i]), 1e-12 * exact[i].abs().max().item<double>())
        << "tensor " << i;
  }
}

// As GPUs compute padding and documents. They have no kernels for dropout, which does not matter
// here.
TEST_P(Dense, AsOneSegmentOfRowsEqualsTheReference) {
  const auto [causal, padded, packed, dropout] = GetParam();
  for (const bool cross : {false, true}) {
    if (cross && (causal || packed)) continue;
    AttentionInput in = input(at::kDouble);
    if (cross) {  // fewer keys, of one head
      constexpr std::int64_t kKeys = 200;
      for (at::Tensor* x : {&in.k_BHSD, &in.v_BHSD}) {
        *x = x->detach().narrow(1, 0, 1).narrow(2, 0, kKeys).requires_grad_();
      }
      if (padded) in.key_lengths_B = in.key_lengths_B.clamp_max(kKeys);
    }
    const std::int64_t S = in.k_BHSD.size(2);
    at::Tensor mask;
    if (padded) mask = at::arange(S, at::kLong) < in.key_lengths_B.view({-1, 1, 1, 1});
    if (packed) {
      mask = and_defined(
          mask, (in.segments_q_BL.unsqueeze(2) == in.segments_q_BL.unsqueeze(1)).unsqueeze(1));
    }
    if (causal) mask = and_defined(mask, at::ones({kLength, S}, at::kBool).tril());
    const RowAttention expected{.q_BHLD = in.q_BHLD,
                                .k_BHSD = in.k_BHSD,
                                .v_BHSD = in.v_BHSD,
                                .first_BL = {},
                                .end_BL = {},
                                .normalizer = {},
                                .dropout = 0,
                                .noise = {}};
    for (const at::Tensor& sink_H : {at::Tensor(), random_tensor({kHeads}, at::kDouble, 3)}) {
      const GatheredAttention rows = as_one_segment(in, causal, sink_H, at::kCPU);
      EXPECT_TRUE(rows.rows.queries.once && rows.rows.queries.whole);
      EXPECT_TRUE(rows.rows.keys.once && rows.rows.keys.whole);
      const at::Tensor out = attend_gathered(rows, Path::kFused).out_BHLD,
                       exact = reference_rows(expected, mask, sink_H);
      EXPECT_LT(max_difference(out, exact), 1e-12);
      const std::vector<at::Tensor> leaves{in.q_BHLD, in.k_BHSD, in.v_BHSD};
      const auto d = gradients(out, leaves), d_exact = gradients(exact, leaves);
      for (std::size_t t = 0; t < leaves.size(); ++t) {
        EXPECT_LT(max_difference(d[t], d_exact[t]), 1e-11) << t;
      }
    }
  }
}

TEST_P(Dense, ErrorsAreThoseOfTheReference) {
  const auto exact = solve(at::kDouble, Path::kReference);
  for (const auto& [dtype, eps] :
       {std::pair{at::kFloat, double{std::numeric_limits<float>::epsilon()}},
        std::pair{at::kBFloat16, 0x1p-7}}) {
    const auto reference = solve(dtype, Path::kReference), ours = solve(dtype, Path::kFused);
    for (std::size_t i = 0; i < exact.size(); ++i) {
      EXPECT_EQ(ours[i].scalar_type(), dtype);
      EXPECT_LE(max_difference(ours[i], exact[i]),
                2 * max_difference(reference[i], exact[i]) +
                    2 * eps * exact[i].abs().max().item<double>())
          << "tensor " << i << " in " << dtype;
    }
  }
}

// 4 threads share the 6 heads of the batch unevenly.
TEST_P(Dense, SameBitsForAnyNumberOfThreads) {
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const auto one = solve(at::kFloat, Path::kFused);
  for (const int more : {2, 4}) {
    at::set_num_threads(more);
    const auto other = solve(at::kFloat, Path::kFused);
    for (std::size_t i = 0; i < one.size(); ++i) {
      EXPECT_TRUE(at::equal(one[i], other[i])) << "tensor " << i << ", threads " << more;
    }
  }
  at::set_num_threads(threads);
}

Built dense(bool causal, std::int64_t head_dim, at::ScalarType dtype, float dropout = 0) {
  configs::Mechanism config;
  config.mutable_dense()->set_dropout(dropout);
  return {config,
          {.channels = head_dim,
           .heads = 1,
           .head_dim = head_dim,
           .sequence_length = 1024,
           .causal = causal},
          dtype};
}

AttentionInput input_of(const std::function<at::Tensor(std::uint64_t)>& heads) {
  AttentionInput in;
  in.q_BHLD = heads(1);
  in.k_BHSD = heads(2);
  in.v_BHSD = heads(3);
  return in;
}

// Wide rows of long sequences; LibTorch computes some of them.
TEST(DenseOfWideHeads, EqualsTheReference) {
  constexpr std::int64_t kLong = 530, kWide = 200;
  for (const float dropout : {0.0f, 0.1f}) {
    for (const bool causal : {false, true}) {
      const Built built = dense(causal, kWide, at::kFloat, dropout);
      AttentionInput in = input_of([](std::uint64_t seed) {
        return random_tensor({2, 1, kLong, kWide}, at::kFloat, seed);
      });
      if (dropout > 0) {
        in.noise = NoiseKey{.seed = 2,
                            .step = at::full({1}, 4, at::kLong),
                            .layer = 1,
                            .sample_ids_B = at::arange(2)};
      }
      for (const bool padded : {false, true}) {
        if (padded) in.key_lengths_B = at::tensor({kLong, std::int64_t{0}});
        EXPECT_LE(max_difference(run(*built.mechanism, in, Path::kFused),
                                 run(*built.mechanism, in, Path::kReference)),
                  1e-5)  // both round sums of 530 terms of about 1 in fp32
            << causal << padded << dropout;
      }
    }
  }
}

// Rows that begin at an odd place and are an odd number of elements apart, so that pairs of bf16
// cannot be read in place. The bits are the same as for adjacent rows.
TEST(DenseOfOddRows, HasTheSameBits) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    const Built built = dense(/*causal=*/true, kHeadDim, dtype);
    const AttentionInput odd = input_of([&](std::uint64_t seed) {
      return random_tensor({2, 1, 128, kHeadDim + 1}, dtype, seed)
          .narrow(-1, 1, kHeadDim)
          .detach()
          .requires_grad_();
    });
    const auto side_by_side = [](const at::Tensor& rows) {
      return rows.detach().contiguous().requires_grad_();
    };
    AttentionInput even = odd;
    for (at::Tensor* rows : {&even.q_BHLD, &even.k_BHSD, &even.v_BHSD}) *rows = side_by_side(*rows);
    const auto solve = [&](const AttentionInput& in) {
      const at::Tensor out = run(*built.mechanism, in, Path::kFused);
      std::vector<at::Tensor> results = gradients(out, {in.q_BHLD, in.k_BHSD, in.v_BHSD});
      results.push_back(out.detach());
      return results;
    };
    const auto of_odd = solve(odd), of_even = solve(even);
    for (std::size_t i = 0; i < of_odd.size(); ++i) {
      EXPECT_TRUE(at::equal(of_odd[i], of_even[i])) << dtype << " tensor " << i;
    }
  }
}

TEST(DenseOfNothing, GivesNothing) {
  for (const std::int64_t tokens : {0, 3}) {
    const AttentionInput in = input_of([&](std::uint64_t seed) {
      return random_tensor({tokens == 0 ? 2 : 0, 1, tokens, 4}, at::kFloat, seed)
          .set_requires_grad(true);
    });
    const at::Tensor out = run(*dense(true, 4, at::kFloat).mechanism, in, Path::kFused);
    EXPECT_EQ(out.sizes(), in.q_BHLD.sizes());
    EXPECT_EQ(gradients(out, {in.q_BHLD})[0].sizes(), in.q_BHLD.sizes());
  }
}

// LibTorch computes attention to the keys of another sequence.
TEST(DenseToOtherKeys, EqualsTheReference) {
  configs::Mechanism config;
  config.mutable_dense();
  const Built built(config, /*causal=*/false, at::kDouble);
  AttentionInput in = random_input(70, at::kDouble, 3);
  const AttentionInput keys = random_input(150, at::kDouble, 4);
  in.k_BHSD = keys.k_BHSD;
  in.v_BHSD = keys.v_BHSD;
  in.key_lengths_B = at::tensor({std::int64_t{150}, std::int64_t{90}});
  EXPECT_LE(max_difference(run(*built.mechanism, in, Path::kFused),
                           run(*built.mechanism, in, Path::kReference)),
            1e-13);  // both round sums of 150 terms of about 1 in fp64
}

}  // namespace
}  // namespace birkhoff::test
