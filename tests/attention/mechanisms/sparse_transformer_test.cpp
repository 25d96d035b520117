// The Sparse Transformer's patterns equal dense attention with a mask, for any stride, summary and
// length. Legend: B batch, H heads, L queries, S keys.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "cluster/base/error.h"
#include "tests/attention/counted_bytes.h"
#include "tests/attention/mechanisms/mechanism_cases.h"

namespace birkhoff::test {
namespace {

using configs::SparseTransformerAttention;
constexpr auto kFixed = SparseTransformerAttention::fixed,
               kStrided = SparseTransformerAttention::strided;
constexpr auto kMerged = SparseTransformerAttention::merged,
               kSecond = SparseTransformerAttention::second;

struct Pattern {
  SparseTransformerAttention::Pattern pattern = kFixed;
  SparseTransformerAttention::Part part = kMerged;
  int stride = 4, summary = 0;

  configs::Mechanism config() const {
    configs::Mechanism config;
    auto& sparse = *config.mutable_sparse_transformer();
    sparse.set_pattern(pattern);
    sparse.set_part(part);
    sparse.set_stride(stride);
    sparse.set_summary(summary);
    return config;
  }
  Built build(std::int64_t num_tokens, bool causal, at::ScalarType dtype = at::kDouble) const {
    return Built(
        config(),
        {.channels = 5, .heads = 2, .head_dim = 3, .sequence_length = num_tokens, .causal = causal},
        dtype);
  }
  // The paper's definition, pair by pair.
  bool sees(std::int64_t i, std::int64_t j, bool causal) const {
    if (causal && j > i) return false;
    const std::int64_t l = stride, c = summary > 0 ? summary : std::max(stride / 16, 1);
    const bool first = pattern == kFixed ? i / l == j / l : std::abs(i - j) < l;
    const bool second = pattern == kFixed ? j % l >= l - c : std::abs(i - j) % l == 0;
    return second || (part == kMerged && first);
  }
  at::Tensor visible(std::int64_t num_tokens, bool causal) const {
    const at::Tensor visible_LS = at::empty({num_tokens, num_tokens}, at::kBool);
    auto entries = visible_LS.accessor<bool, 2>();
    for (std::int64_t i = 0; i < num_tokens; ++i) {
      for (std::int64_t j = 0; j < num_tokens; ++j) entries[i][j] = sees(i, j, causal);
    }
    return visible_LS;
  }
  std::string name() const {
    return std::string(pattern == kFixed ? "fixed" : "strided") +
           (part == kMerged ? "" : ", second") + ", stride " + std::to_string(stride) +
           ", summary " + std::to_string(summary);
  }
};

// Of all pairs of pattern and part.
std::vector<Pattern> patterns(int stride, int summary) {
  std::vector<Pattern> all;
  for (const auto part : {kMerged, kSecond}) {
    all.push_back({kFixed, part, stride, summary});
    all.push_back({kStrided, part, stride});
  }
  return all;
}

// Softmax over the visible keys; 0 for queries that see none.
at::Tensor masked_attention(const AttentionInput& in, const at::Tensor& visible) {
  const at::Tensor scores = at::matmul(in.q_BHLD, in.k_BHSD.transpose(2, 3)) / std::sqrt(3.0);
  const at::Tensor hidden = visible.logical_not(), none = hidden.all(-1, /*keepdim=*/true);
  const at::Tensor p = scores.masked_fill(at::logical_and(hidden, none.logical_not()), -INFINITY)
                           .softmax(-1)
                           .masked_fill(none, 0);
  return at::matmul(p, in.v_BHSD);
}

TEST(SparseTransformer, IsDenseAttentionWithAMask) {
  for (const bool causal : {false, true}) {
    for (const auto& [stride, summary, num_tokens] : {std::tuple(1, 0, 9),
                                                      {4, 1, 23},
                                                      {4, 2, 23},
                                                      {5, 9, 24},
                                                      {16, 0, 150},
                                                      {64, 8, 200},
                                                      {70, 3, 215},
                                                      {100, 0, 90},
                                                      {13, 5, 1}}) {
      for (const Pattern& pattern : patterns(stride, summary)) {
        SCOPED_TRACE(pattern.name() + " of " + std::to_string(num_tokens) +
                     (causal ? " causal" : ""));
        const Built built = pattern.build(num_tokens, causal);
        const AttentionInput in = random_input(num_tokens, at::kDouble, 1);
        const at::Tensor visible_LS = pattern.visible(num_tokens, causal);
        EXPECT_TRUE(at::equal(built.mechanism->visible_keys(num_tokens, num_tokens), visible_LS));
        const at::Tensor expected = masked_attention(in, visible_LS);
        const auto all = leaves(in, built.parameters);
        const auto d_expected = gradients(expected, all);
        for (const Path path : {Path::kReference, Path::kSdpa, Path::kFused}) {
          const at::Tensor out = run(*built.mechanism, in, path);
          EXPECT_LE(max_difference(out, expected), 1e-13);
          const auto d = gradients(out, all);
          for (std::size_t i = 0; i < all.size(); ++i) {
            EXPECT_LE(max_difference(d[i], d_expected[i]), 1e-12) << "leaf " << i;
          }
        }
      }
    }
  }
}

TEST(SparseTransformer, HidesPaddingAndOtherDocuments) {
  constexpr std::int64_t kTokens = 200;
  for (const bool causal : {false, true}) {
    for (const int stride : {4, 16, 70}) {
      for (const Pattern& pattern : patterns(stride, 3)) {
        SCOPED_TRACE(pattern.name() + (causal ? " causal" : ""));
        const Built built = pattern.build(kTokens, causal);
        AttentionInput in = random_input(kTokens, at::kDouble, 1);
        const at::Tensor place = at::arange(kTokens);
        in.key_lengths_B = at::tensor({150, 200}, at::kLong);
        in.segments_q_BL = in.segments_kv_BS =
            at::stack({place >= 70, (place >= 40).to(at::kInt) + (place >= 130)}).to(at::kInt);
        const at::Tensor same = in.segments_q_BL.unsqueeze(2) == in.segments_kv_BS.unsqueeze(1);
        const at::Tensor valid = (place < in.key_lengths_B.unsqueeze(1)).unsqueeze(1);
        const at::Tensor visible =
            at::logical_and(at::logical_and(same, valid), pattern.visible(kTokens, causal));
        const at::Tensor expected = masked_attention(in, visible.unsqueeze(1));
        for (const Path path : {Path::kReference, Path::kSdpa, Path::kFused}) {
          EXPECT_LE(max_difference(run(*built.mechanism, in, path), expected), 1e-13);
        }
      }
    }
  }
}

TEST(SparseTransformer, DegeneratePatternsAreDenseAttention) {
  const AttentionInput in = random_input(20, at::kDouble, 1);
  configs::Mechanism dense;
  dense.mutable_dense();
  for (const bool causal : {false, true}) {
    const at::Tensor expected = run(*Built(dense, causal, at::kDouble).mechanism, in, Path::kFused);
    for (const Pattern& pattern : {Pattern{kFixed, kMerged, 20, 3}, Pattern{kFixed, kMerged, 4, 4},
                                   Pattern{kFixed, kSecond, 4, 4}, Pattern{kStrided, kMerged, 20},
                                   Pattern{kStrided, kMerged, 1}, Pattern{kStrided, kSecond, 1}}) {
      EXPECT_LE(
          max_difference(run(*pattern.build(20, causal).mechanism, in, Path::kFused), expected),
          1e-14)
          << pattern.name() << causal;
    }
  }
}

// Heads that are split between two groups, or layers that alternate, see the keys of merged heads.
TEST(SparseTransformer, TheFirstPartIsAnotherMechanism) {
  configs::Mechanism blocks, window;
  blocks.mutable_block_local()->set_block(5);
  window.mutable_sliding_window()->set_width(5);
  for (const bool causal : {false, true}) {
    for (const auto& [pattern, first] : {std::pair(kFixed, blocks), {kStrided, window}}) {
      const auto visible = [&](const configs::Mechanism& config) {
        return Built(config, causal, at::kFloat).mechanism->visible_keys(23, 23);
      };
      EXPECT_TRUE(at::equal(
          visible(Pattern{pattern, kMerged, 5, 2}.config()),
          at::logical_or(visible(first), visible(Pattern{pattern, kSecond, 5, 2}.config()))));
    }
  }
}

TEST(SparseTransformer, FlopsCountThePairs) {
  for (const bool causal : {false, true}) {
    for (const auto& [stride, summary, num_tokens] :
         {std::tuple(1, 0, 10), {4, 1, 10}, {4, 3, 19}, {4, 9, 19}, {32, 0, 19}}) {
      for (const Pattern& pattern : patterns(stride, summary)) {
        const double pairs = pattern.visible(num_tokens, causal).sum().item<double>();
        EXPECT_EQ(pattern.build(num_tokens, causal).mechanism->forward_flops(num_tokens),
                  4 * pairs * 2 * 3)
            << pattern.name() << num_tokens << causal;
      }
    }
  }
  const auto keys_per_query = [](const Pattern& pattern) {
    return pattern.build(1024, true).mechanism->forward_flops(1024) / (4 * 2 * 3 * 1024);
  };
  EXPECT_EQ(keys_per_query({kFixed, kMerged, 64, 8}), 92.5);
  EXPECT_EQ(keys_per_query({kStrided, kMerged, 64}), 69.53125);
}

// What the conformance tests check for the default pattern, with every term of the logits.
TEST(SparseTransformer, EveryPatternIsCausalDecodesAndDropsAlikeOnAllPaths) {
  constexpr std::int64_t kLength = 23;
  const at::NoGradGuard no_grad;
  for (const Pattern& pattern : patterns(5, 2)) {
    SCOPED_TRACE(pattern.name());
    configs::Mechanism config = pattern.config();
    config.set_sink(true);
    config.mutable_relative_positions()->set_max_distance(7);
    const Built built(config, /*causal=*/true, at::kDouble);
    AttentionInput in = random_input(kLength, at::kDouble, 1);
    const at::Tensor out = run(*built.mechanism, in, Path::kFused);
    const auto state = built.mechanism->decode_state(2);
    for (std::int64_t t = 0; t < kLength; ++t) {
      const at::Tensor step = built.mechanism->decode_step(*state, token_slice(in, t, 1));
      EXPECT_LE(max_difference(step, out.narrow(2, t, 1)), 1e-12) << t;
    }
    for (const std::int64_t t : {1, 4, 5, 14, 15, 22}) {
      const at::Tensor changed =
          run(*built.mechanism, replace_tokens(in, t, kLength, 50), Path::kFused);
      EXPECT_TRUE(at::equal(out.narrow(2, 0, t), changed.narrow(2, 0, t))) << t;
    }
    config.mutable_sparse_transformer()->set_dropout(0.3f);
    const Built dropping(config, /*causal=*/true, at::kDouble);
    in.noise = NoiseKey{.seed = 5,
                        .step = at::full({1}, 3, at::kLong),
                        .layer = 2,
                        .sample_ids_B = at::tensor({41, 97}, at::kLong)};
    const at::Tensor dropped = run(*dropping.mechanism, in, Path::kFused);
    EXPECT_GT(max_difference(dropped, out), 1e-3);
    EXPECT_LE(max_difference(dropped, run(*dropping.mechanism, in, Path::kReference)), 1e-12);
  }
}

// Each part draws noise of its own: a block's first key and the first summary are not dropped
// together.
TEST(SparseTransformer, PartsDropKeysOfTheirOwn) {
  const at::NoGradGuard no_grad;
  constexpr std::int64_t kHeads = 64, kLength = 6;
  configs::Mechanism config = Pattern{kFixed, kMerged, 4, 1}.config();
  config.mutable_sparse_transformer()->set_dropout(0.5f);
  const Built built(config,
                    {.channels = 5,
                     .heads = kHeads,
                     .head_dim = kLength,
                     .sequence_length = kLength,
                     .causal = true},
                    at::kDouble);
  // Keys are equal and values name them, so that outputs show which keys are kept.
  AttentionInput in;
  in.q_BHLD = in.k_BHSD = at::zeros({1, kHeads, kLength, kLength}, at::kDouble);
  in.v_BHSD = at::eye(kLength, at::kDouble).expand({1, kHeads, kLength, kLength});
  in.noise = NoiseKey{.seed = 5,
                      .step = at::full({1}, 3, at::kLong),
                      .layer = 2,
                      .sample_ids_B = at::tensor({41}, at::kLong)};
  const at::Tensor kept_HS = run(*built.mechanism, in, Path::kFused).select(2, 5)[0] > 0;
  EXPECT_FALSE(at::equal(kept_HS.select(1, 3), kept_HS.select(1, 4)));
  for (const std::int64_t key : {3, 4, 5}) {
    const auto kept = kept_HS.select(1, key).sum().item<std::int64_t>();
    EXPECT_GT(kept, kHeads / 4);
    EXPECT_LT(kept, 3 * kHeads / 4);
  }
}

// Nothing of L x L: twice the tokens take little more than twice the memory.
TEST(SparseTransformer, MemoryGrowsWithTheLength) {
  for (const Pattern& pattern : patterns(32, 4)) {
    const auto bytes_of = [&](std::int64_t num_tokens) {
      const Built built = pattern.build(num_tokens, /*causal=*/true, at::kFloat);
      const AttentionInput in = random_input(num_tokens, at::kFloat, 1);
      const CountedBytes bytes;
      gradients(run(*built.mechanism, in, Path::kFused), leaves(in, built.parameters));
      return static_cast<double>(bytes.total());
    };
    EXPECT_LE(bytes_of(2048), 2.2 * bytes_of(1024)) << pattern.name();
  }
}

TEST(SparseTransformer, RefusesMorePositionsThanFit) {
  const Built built = Pattern{}.build(50'000, /*causal=*/true, at::kFloat);
  AttentionInput in = random_input(50'000, at::kFloat, 1);
  in.segments_q_BL = in.segments_kv_BS = at::arange(50'000, at::kInt).expand({2, -1});
  try {
    run(*built.mechanism, in, Path::kFused);
    FAIL() << "50,000 documents of one token were accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kData);
    EXPECT_THAT(error.what(),
                ::testing::HasSubstr("50000 documents in a sequence of 50000 tokens"));
  }
}

}  // namespace
}  // namespace birkhoff::test
