#include "runtime/decoding/generator.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "cluster/base/error.h"

namespace birkhoff {
namespace {

struct NoCache final : DecodeCache {
  void select_rows(const at::Tensor&) override {}
  std::int64_t length() const override { return 0; }
};

// Its logits depend only on the last token, and it records the tokens fed to each cache.
class RecordingModel final : public Decoder {
 public:
  explicit RecordingModel(at::Tensor logits_VV) : logits_VV_(std::move(logits_VV)) {}

  std::vector<std::vector<std::int32_t>> fed;  // tokens of each cache, in order of creation

  std::unique_ptr<DecodeCache> decode_cache(std::int64_t batch) override {
    EXPECT_EQ(batch, 1);
    fed.emplace_back();
    return std::make_unique<NoCache>();
  }
  at::Tensor decode_step(DecodeCache&, const at::Tensor& tokens_B) override {
    fed.back().push_back(tokens_B.item<int>());
    return logits_VV_.index_select(0, tokens_B);
  }
  std::int64_t max_tokens() const override { return window; }

  at::Device device() const override { return at::kCPU; }

  std::int64_t window = 1000;

 private:
  at::Tensor logits_VV_;
};

using Ids = std::vector<std::int32_t>;

// After id n comes n + 1 (modulo 5), by far the likeliest.
at::Tensor counting() { return at::eye(5).roll(1, 1) * 10; }

TEST(Generator, GreedyFollowsTheLikeliest) {
  RecordingModel model(counting());
  EXPECT_EQ(generate(model, {2, 3}, {.tokens = 6, .sampling = {.temperature = 0}}),
            (Ids{4, 0, 1, 2, 3, 4}));
  EXPECT_EQ(model.fed, (std::vector<Ids>{{2, 3, 4, 0, 1, 2, 3}}));  // the last id is not fed
}

TEST(Generator, GreedyTakesTheSmallestOfEquals) {
  RecordingModel model(at::zeros({5, 5}));
  EXPECT_EQ(generate(model, {4}, {.tokens = 2, .sampling = {.temperature = 0}}), (Ids{0, 0}));
}

TEST(Generator, AnEmptyPromptBeginsWithTheEndMark) {
  RecordingModel model(counting());
  const GenerateOptions options{.tokens = 2, .sampling = {.temperature = 0}, .end_mark = 3};
  EXPECT_EQ(generate(model, {}, options), (Ids{4, 0}));
  EXPECT_TRUE(generate(model, {}, {.tokens = 0, .end_mark = 3}).empty());
  EXPECT_THROW(generate(model, {}, {.tokens = 2}), std::exception);
}

TEST(Generator, ATextEndsBeforeTheEndMark) {
  RecordingModel model(counting());
  const GenerateOptions options{.tokens = 100, .sampling = {.temperature = 0}, .end_mark = 3};
  Ids taken;
  EXPECT_EQ(generate(model, {4}, options, [&](std::int32_t id) { taken.push_back(id); }),
            (Ids{0, 1, 2}));
  EXPECT_EQ(taken, (Ids{0, 1, 2}));
  EXPECT_EQ(model.fed, (std::vector<Ids>{{4, 0, 1, 2}}));
  EXPECT_TRUE(generate(model, {2}, options).empty());
}

TEST(Generator, FullCacheIsRebuiltFromTheLastHalfWindow) {
  RecordingModel model(counting());
  model.window = 4;
  EXPECT_EQ(generate(model, {0, 1}, {.tokens = 6, .sampling = {.temperature = 0}}),
            (Ids{2, 3, 4, 0, 1, 2}));
  EXPECT_EQ(model.fed, (std::vector<Ids>{{0, 1, 2, 3}, {3, 4, 0, 1}}));
}

TEST(Generator, WindowOfOneToken) {
  RecordingModel model(counting());
  model.window = 1;
  EXPECT_EQ(generate(model, {0}, {.tokens = 3, .sampling = {.temperature = 0}}), (Ids{1, 2, 3}));
  EXPECT_EQ(model.fed, (std::vector<Ids>{{0}, {1}, {2}}));
}

TEST(Generator, OfALongPromptTheLastWindowIsRead) {
  RecordingModel model(counting());
  model.window = 3;
  EXPECT_EQ(generate(model, {4, 4, 4, 0, 1}, {.tokens = 1, .sampling = {.temperature = 0}}),
            (Ids{2}));
  EXPECT_EQ(model.fed, (std::vector<Ids>{{4, 0, 1}}));
  EXPECT_EQ(unread_prompt_ids(model, {4, 4, 4, 0, 1}), 2);
  EXPECT_EQ(unread_prompt_ids(model, {4, 0, 1}), 0);
  EXPECT_EQ(unread_prompt_ids(model, {}), 0);
}

// An end mark is read with its document; the next id starts a new cache, at position 0.
TEST(Generator, DocumentsRestartAfterTheirEndMark) {
  RecordingModel model(counting());
  const auto options = [](std::int64_t tokens) {
    return GenerateOptions{
        .tokens = tokens, .sampling = {.temperature = 0}, .end_mark = 4, .restarts = true};
  };
  EXPECT_EQ(generate(model, {}, options(3)), (Ids{0, 1, 2}));
  EXPECT_EQ(model.fed, (std::vector<Ids>{{4}, {0, 1}}));
  model.fed.clear();
  EXPECT_EQ(generate(model, {1, 4, 2}, options(2)), (Ids{3}));
  EXPECT_EQ(model.fed, (std::vector<Ids>{{1, 4}, {2, 3}}));
}

// A full cache is rebuilt only from the current document.
TEST(Generator, RebuiltCacheHoldsNothingOfAnEarlierDocument) {
  RecordingModel model(at::eye(10).roll(1, 1) * 10);  // counts modulo 10
  model.window = 4;
  const GenerateOptions options{.sampling = {.temperature = 0}, .end_mark = 9, .restarts = true};
  EXPECT_EQ(generate(model, {8, 9}, options), (Ids{0, 1, 2, 3, 4, 5, 6, 7, 8}));
  EXPECT_EQ(model.fed, (std::vector<Ids>{{8, 9}, {0, 1, 2, 3}, {3, 4, 5, 6}, {6, 7, 8}}));
  model.fed.clear();  // the mark fills the cache: a restart, not a rebuild
  generate(model, {6, 7, 8, 9}, options);
  EXPECT_EQ(model.fed, (std::vector<Ids>{{6, 7, 8, 9}, {0, 1, 2, 3}, {3, 4, 5, 6}, {6, 7, 8}}));
}

// Frequencies of 20,000 draws within 4 standard deviations of softmax(logits / temperature) over
// the top k, and over the fewest of those whose probabilities reach top_p.
TEST(Generator, SamplesHaveTheirProbabilities) {
  const std::vector<double> logits = {0.5, 2.0, -1.0, 1.0, 0.0};
  RecordingModel model(at::tensor(logits, at::kDouble).expand({5, 5}));
  struct Case {
    double temperature;
    std::int64_t top_k;
    double top_p = 1;
    std::size_t kept_by_top_p = 5;
  };
  // Probabilities at temperature 1: 0.56, 0.21, 0.13, 0.08, 0.03; of only the first three: 0.63,
  // 0.23, 0.14; at temperature 2: 0.37, 0.23, 0.18, 0.14, 0.08.
  for (const Case c : {Case{1, 0}, Case{0.5, 0}, Case{1, 3}, Case{2, 99}, Case{1, 0, 0.88, 3},
                       Case{1, 0, 0.92, 4}, Case{1, 0, 0.5, 1}, Case{2, 0, 0.5, 2},
                       Case{1, 3, 0.85, 2}, Case{1, 3, 0.87, 3}, Case{1, 2, 0.99, 2}}) {
    constexpr int kDraws = 20000;
    const Ids ids = generate(
        model, {0},
        {.tokens = kDraws,
         .sampling = {
             .temperature = c.temperature, .top_k = c.top_k, .top_p = c.top_p, .seed = 9}});
    std::vector<double> weights;
    double sum = 0;
    for (const double logit : logits) {
      const auto above =
          std::count_if(logits.begin(), logits.end(), [&](double x) { return x > logit; });
      const bool kept =
          (c.top_k == 0 || above < c.top_k) && static_cast<std::size_t>(above) < c.kept_by_top_p;
      weights.push_back(kept ? std::exp(logit / c.temperature) : 0);
      sum += weights.back();
    }
    for (std::int32_t id = 0; id < 5; ++id) {
      const double p = weights[static_cast<std::size_t>(id)] / sum;
      EXPECT_NEAR(std::count(ids.begin(), ids.end(), id), p * kDraws,
                  4 * std::sqrt(kDraws * p * (1 - p)))
          << id;
    }
  }
}

TEST(Generator, SeedAndOptionsDecideTheSample) {
  RecordingModel model(at::zeros({50, 50}));
  const GenerateOptions options{.tokens = 40, .sampling = {.seed = 3}};
  const Ids ids = generate(model, {1}, options);
  EXPECT_EQ(generate(model, {1}, options), ids);
  EXPECT_NE(generate(model, {1}, {.tokens = 40, .sampling = {.seed = 4}}), ids);
  // Id n depends on (seed, n), not on the number of ids requested.
  EXPECT_EQ(generate(model, {1}, {.tokens = 7, .sampling = {.seed = 3}}),
            Ids(ids.begin(), ids.begin() + 7));
}

// Several texts of one seed: each has its own noise, keyed by its number.
TEST(Generator, TextsOfOneSeedDiffer) {
  RecordingModel model(at::zeros({50, 50}));
  const auto text = [&](std::uint64_t seed, std::uint64_t number) {
    return generate(model, {1}, {.tokens = 40, .sampling = {.seed = seed}, .text = number});
  };
  EXPECT_EQ(text(3, 0), generate(model, {1}, {.tokens = 40, .sampling = {.seed = 3}}));
  EXPECT_EQ(text(3, 1), text(3, 1));
  EXPECT_NE(text(3, 0), text(3, 1));
  EXPECT_NE(text(3, 1), text(3, 2));
  EXPECT_NE(text(3, 1), text(4, 1));
}

// The same seed gives the same text in every version. Computed independently from Philox and
// softmax.
TEST(Generator, SamplesAreWhatTheyWere) {
  RecordingModel model(at::zeros({50, 50}));
  EXPECT_EQ(generate(model, {1}, {.tokens = 6, .sampling = {.seed = 3}}),
            (Ids{32, 46, 3, 25, 20, 36}));
  RecordingModel other(at::eye(50).roll(1, 1) * 3);
  EXPECT_EQ(
      generate(other, {1}, {.tokens = 6, .sampling = {.temperature = 0.8, .top_k = 7, .seed = 4}}),
      (Ids{5, 0, 1, 2, 3, 4}));
}

TEST(Generator, IdsAreGivenAsTheyAreDrawn) {
  RecordingModel model(counting());
  Ids given;
  std::vector<std::size_t> num_fed;
  const Ids ids =
      generate(model, {2, 3}, {.tokens = 4, .sampling = {.temperature = 0}}, [&](std::int32_t id) {
        given.push_back(id);
        num_fed.push_back(model.fed.back().size());
      });
  EXPECT_EQ(given, ids);
  EXPECT_EQ(num_fed, (std::vector<std::size_t>{2, 3, 4, 5})) << "before the next is computed";
}

TEST(Generator, BadOptionsAreUsageErrors) {
  RecordingModel model(counting());
  for (const GenerateOptions& options :
       {GenerateOptions{.tokens = -1}, GenerateOptions{.sampling = {.temperature = -0.5}},
        GenerateOptions{.sampling = {.temperature = std::nan("")}},
        GenerateOptions{.sampling = {.top_k = -2}}, GenerateOptions{.sampling = {.top_p = 0}},
        GenerateOptions{.sampling = {.top_p = 1.1}},
        GenerateOptions{.sampling = {.top_p = std::nan("")}}}) {
    try {
      generate(model, {1}, options);
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kUsage);
    }
  }
}

}  // namespace
}  // namespace birkhoff
