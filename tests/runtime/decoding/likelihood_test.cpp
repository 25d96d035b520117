// Likelihoods are sums over the counted tokens only, whatever else is in the batch.
#include "runtime/decoding/likelihood.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "cluster/base/error.h"

namespace birkhoff {
namespace {

// The logits after a token depend on it, its position and its document.
class ToyScorer final : public TokenScorer {
 public:
  static constexpr std::int64_t kVocabulary = 7;

  at::Device device() const override { return at::kCPU; }
  at::Tensor logits(const Batch& batch, const std::optional<NoiseKey>& noise) override {
    EXPECT_FALSE(noise.has_value());
    const at::Tensor& inputs_BT = batch.at(field::kInputs);
    at::Tensor logits_BTV = at::empty({inputs_BT.size(0), inputs_BT.size(1), kVocabulary});
    for (std::int64_t b = 0; b < inputs_BT.size(0); ++b) {
      for (std::int64_t t = 0; t < inputs_BT.size(1); ++t) {
        const bool has_documents = batch.has(field::kSegments);
        logits_BTV[b][t] =
            after(inputs_BT[b][t].item<std::int64_t>(),
                  has_documents ? batch.at(field::kPositions)[b][t].item<std::int64_t>() : t,
                  has_documents ? batch.at(field::kSegments)[b][t].item<std::int64_t>() : 0);
      }
    }
    return logits_BTV;
  }
  std::int64_t max_tokens() const override { return 8; }

  static at::Tensor after(std::int64_t token, std::int64_t position, std::int64_t document) {
    at::Tensor logits_V = at::empty({kVocabulary});
    for (std::int64_t id = 0; id < kVocabulary; ++id)
      logits_V[id] =
          3 *
          std::sin(static_cast<double>(1 + id * 5 + token * 11 + position * 17 + document * 29));
    return logits_V;
  }
  static double log_p(std::int64_t token, std::int64_t position, std::int64_t document,
                      std::int64_t next) {
    return at::log_softmax(after(token, position, document).to(at::kDouble), 0)[next]
        .item<double>();
  }
};

TEST(Likelihood, IsTheSumOverTheCountedTokens) {
  ToyScorer model;
  const std::vector<ScoredTokens> texts = {
      {{1, 2, 3, 4, 5}, 2}, {{6, 0}, 1}, {{1, 2, 3, 4, 5}, 4}, {{0, 1, 2, 3, 4, 5, 6, 0, 1}, 8}};
  const std::vector<Likelihood> found = likelihoods(model, texts);
  ASSERT_EQ(found.size(), texts.size());
  for (std::size_t i = 0; i < texts.size(); ++i) {
    const std::vector<std::int32_t>& ids = texts[i].ids;
    double sum = 0;
    for (std::size_t t = ids.size() - static_cast<std::size_t>(texts[i].num_counted);
         t < ids.size(); ++t) {
      sum += ToyScorer::log_p(ids[t - 1], static_cast<std::int64_t>(t) - 1, 0, ids[t]);
    }
    EXPECT_NEAR(found[i].log_probability, sum, 1e-12);  // the same fp32 logits, summed in fp64
    EXPECT_EQ(found[i].num_tokens, texts[i].num_counted);
    EXPECT_EQ(likelihoods(model, {texts[i]})[0].log_probability, found[i].log_probability);
  }
}

TEST(Likelihood, GreedyTokensAreTheLikeliestOnes) {
  ToyScorer model;
  std::vector<std::int32_t> ids = {3};
  for (std::int64_t t = 0; t < 5; ++t)
    ids.push_back(ToyScorer::after(ids.back(), t, 0).argmax().item<std::int32_t>());
  EXPECT_TRUE(likelihoods(model, {{ids, 5}})[0].is_greedy);
  ids[2] = (ids[2] + 1) % ToyScorer::kVocabulary;
  EXPECT_FALSE(likelihoods(model, {{ids, 5}})[0].is_greedy);
  // Counted tokens decide, and the tokens before them are given.
  std::vector<std::int32_t> given = {ids[0], ids[1], ids[2]};
  for (std::int64_t t = 2; t < 5; ++t)
    given.push_back(ToyScorer::after(given.back(), t, 0).argmax().item<std::int32_t>());
  EXPECT_TRUE(likelihoods(model, {{given, 3}})[0].is_greedy);
}

TEST(Likelihood, LikeliestTokensFollowTheTrueOnes) {
  ToyScorer model;
  const std::vector<ScoredTokens> texts = {{{1, 2, 3, 4, 5}, 2}, {{6, 0}, 1}, {{4, 3, 2, 1}, 3}};
  const auto found = likeliest_tokens(model, texts);
  ASSERT_EQ(found.size(), texts.size());
  for (std::size_t i = 0; i < texts.size(); ++i) {
    const std::vector<std::int32_t>& ids = texts[i].ids;
    std::vector<std::int32_t> expected;
    for (std::size_t t = ids.size() - static_cast<std::size_t>(texts[i].num_counted);
         t < ids.size(); ++t) {
      expected.push_back(ToyScorer::after(ids[t - 1], static_cast<std::int64_t>(t) - 1, 0)
                             .argmax()
                             .item<std::int32_t>());
    }
    EXPECT_EQ(found[i], expected);
  }
}

TEST(Likelihood, DocumentsBeginAtPositionZero) {
  ToyScorer model;
  constexpr std::int32_t kEnd = 6;
  const Likelihood found = likelihoods(model, {{{kEnd, 1, 2, kEnd, 3}, 4}}, kEnd)[0];
  EXPECT_NEAR(found.log_probability,
              ToyScorer::log_p(kEnd, 0, 0, 1) + ToyScorer::log_p(1, 0, 1, 2) +
                  ToyScorer::log_p(2, 1, 1, kEnd) + ToyScorer::log_p(kEnd, 2, 1, 3),
              1e-12);
}

TEST(Likelihood, OfADivergedModelIsAnError) {
  class Diverged final : public TokenScorer {
   public:
    at::Device device() const override { return at::kCPU; }
    at::Tensor logits(const Batch& batch, const std::optional<NoiseKey>&) override {
      return at::full({batch.size(), batch.at(field::kInputs).size(1), 3}, NAN);
    }
    std::int64_t max_tokens() const override { return 8; }
  } model;
  try {
    likelihoods(model, {{{0, 1}, 1}});
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kNumerical);
  }
  try {
    likeliest_tokens(model, {{{0, 1}, 1}});
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kNumerical);
  }
}

}  // namespace
}  // namespace birkhoff
