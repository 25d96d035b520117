// Beam search finds what a search over all sequences finds, and sources do not affect one another.
#include "runtime/decoding/sequence_search.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>

#include "cluster/base/error.h"
#include "runtime/decoding/generator.h"

namespace birkhoff {
namespace {

using Ids = std::vector<std::int32_t>;

constexpr std::int32_t kEnd = 0;

// The ids that were fed to each row.
struct Histories final : DecodeCache {
  std::vector<Ids> rows;

  void select_rows(const at::Tensor& rows_B) override {
    std::vector<Ids> selected;
    for (std::int64_t i = 0; i < rows_B.numel(); ++i)
      selected.push_back(rows[static_cast<std::size_t>(rows_B[i].item<std::int64_t>())]);
    rows = std::move(selected);
  }
  std::int64_t length() const override { return std::ssize(rows.front()); }
};

// Its logits are random functions of all ids before, the first of which is the source.
class ToyModel final : public Decoder {
 public:
  // steps: the number of different logits; with few, many sequences are equally likely.
  ToyModel(std::int64_t vocabulary, int steps) : vocabulary_(vocabulary), steps_(steps) {}

  at::Device device() const override { return at::kCPU; }
  std::unique_ptr<DecodeCache> decode_cache(std::int64_t batch) override {
    auto cache = std::make_unique<Histories>();
    cache->rows.resize(static_cast<std::size_t>(batch));
    return cache;
  }
  at::Tensor decode_step(DecodeCache& cache, const at::Tensor& tokens_B) override {
    std::vector<Ids>& rows = dynamic_cast<Histories&>(cache).rows;
    EXPECT_EQ(tokens_B.numel(), std::ssize(rows));
    std::vector<at::Tensor> logits;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      rows[i].push_back(tokens_B[static_cast<std::int64_t>(i)].item<std::int32_t>());
      logits.push_back(logits_after(rows[i]));
    }
    ++num_steps;
    return at::stack(logits);
  }
  std::int64_t max_tokens() const override { return 100; }

  at::Tensor logits_after(const Ids& ids) const {
    std::seed_seq seeds(ids.begin(), ids.end());
    std::mt19937 random(seeds);
    const at::Tensor logits_V = at::empty({vocabulary_}, at::kDouble);
    for (std::int64_t id = 0; id < vocabulary_; ++id) {
      const auto step = random() % static_cast<unsigned>(steps_);
      logits_V[id] = 4.0 * static_cast<double>(step) / steps_;
    }
    return logits_V;
  }
  at::Tensor log_probabilities(const Ids& ids) const {
    // As the search computes them, so that ties are the same.
    const at::Tensor logits_RV = logits_after(ids).unsqueeze(0);
    return (logits_RV - at::logsumexp(logits_RV, 1, /*keepdim=*/true)).squeeze(0);
  }

  int num_steps = 0;

 private:
  std::int64_t vocabulary_;
  int steps_;
};

constexpr int kDistinct = 1 << 20;  // no two logits are equal

Ids operator+(Ids ids, std::int32_t id) {
  ids.push_back(id);
  return ids;
}

double score_of(double log_probability, std::size_t length, const SearchOptions& options) {
  return log_probability / std::pow((options.length_offset + static_cast<double>(length)) /
                                        (options.length_offset + 1),
                                    options.length_penalty);
}

// The best of all sequences that end with the end mark or have max_tokens ids.
FoundSequence best_of_all(const ToyModel& model, std::int64_t vocabulary, const SearchStart& start,
                          const SearchOptions& options) {
  FoundSequence best;
  best.score = -INFINITY;
  const std::function<void(const Ids&, double)> extend = [&](const Ids& ids, double so_far) {
    Ids history = {start.last};
    history.insert(history.end(), ids.begin(), ids.end());
    const at::Tensor log_p = model.log_probabilities(history);
    for (std::int32_t id = 0; id < vocabulary; ++id) {
      const Ids next = ids + id;
      const double sum = so_far + log_p[id].item<double>();
      if (id != kEnd && std::ssize(next) < start.max_tokens) {
        extend(next, sum);
      } else if (const double score = score_of(sum, next.size(), options); score > best.score) {
        best = {next, sum, score};
      }
    }
  };
  extend({}, 0);
  return best;
}

// The rules of the header, one source, with everything sorted.
FoundSequence by_the_rules(const ToyModel& model, std::int64_t vocabulary, const SearchStart& start,
                           const SearchOptions& options) {
  struct Sequence {
    Ids ids;
    double sum = 0;
  };
  std::vector<Sequence> live = {{}}, finished;
  const auto beam = static_cast<std::size_t>(options.beam);
  while (!live.empty() && finished.size() < beam) {
    std::vector<Sequence> extensions;
    for (const Sequence& sequence : live) {
      Ids history = {start.last};
      history.insert(history.end(), sequence.ids.begin(), sequence.ids.end());
      const at::Tensor log_p = model.log_probabilities(history);
      for (std::int32_t id = 0; id < vocabulary; ++id)
        extensions.push_back({sequence.ids + id, sequence.sum + log_p[id].item<double>()});
    }
    std::stable_sort(extensions.begin(), extensions.end(),
                     [](const auto& a, const auto& b) { return a.sum > b.sum; });
    live.clear();
    for (std::size_t rank = 0; rank < extensions.size(); ++rank) {
      const bool ends = extensions[rank].ids.back() == kEnd;
      const bool is_full = std::ssize(extensions[rank].ids) == start.max_tokens;
      if (rank < beam && (ends || is_full)) finished.push_back(extensions[rank]);
      if (!ends && !is_full && live.size() < beam) live.push_back(extensions[rank]);
    }
  }
  const auto score = [&](const Sequence& sequence) {
    return score_of(sequence.sum, sequence.ids.size(), options);
  };
  const auto best =
      std::max_element(finished.begin(), finished.end(),
                       [&](const auto& a, const auto& b) { return score(a) < score(b); });
  return {best->ids, best->sum, score(*best)};
}

std::vector<FoundSequence> find(ToyModel& model, const std::vector<SearchStart>& starts,
                                const SearchOptions& options) {
  return find_sequences(model, model.decode_cache(std::ssize(starts)), starts, options);
}

std::vector<SearchOptions> penalties(std::int64_t beam) {
  return {{.beam = beam, .end_mark = kEnd},
          {.beam = beam, .length_penalty = 0.6, .end_mark = kEnd},
          {.beam = beam, .length_penalty = 1, .length_offset = 0, .end_mark = kEnd}};
}

// A beam of all sequences there can be.
TEST(SequenceSearch, WideBeamFindsTheBestOfAllSequences) {
  constexpr std::int64_t kVocabulary = 4;
  ToyModel model(kVocabulary, kDistinct);
  std::vector<Ids> found_with_penalty;
  for (const SearchOptions& options : penalties(300)) {
    for (std::int32_t source = 0; source < 20; ++source) {
      const SearchStart start{.last = source, .max_tokens = 1 + source % 5};
      const FoundSequence found = find(model, {start}, options)[0],
                          best = best_of_all(model, kVocabulary, start, options);
      EXPECT_EQ(found.ids, best.ids);
      EXPECT_NEAR(found.score, best.score, 1e-12);  // a few roundings of sums below 10
      EXPECT_NEAR(found.log_probability, best.log_probability, 1e-12);
      if (source % 5 == 4) found_with_penalty.push_back(found.ids);
    }
  }
  // The penalty matters, or this test says nothing about it.
  const auto third = static_cast<std::ptrdiff_t>(found_with_penalty.size() / 3);
  const Ids first_source = found_with_penalty.front();
  EXPECT_FALSE(std::equal(found_with_penalty.begin(), found_with_penalty.begin() + third,
                          found_with_penalty.end() - third));
}

// In a batch each source finds what it finds by itself, also where scores are equal.
TEST(SequenceSearch, SourcesOfABatchFindWhatTheyFindAlone) {
  constexpr std::int64_t kVocabulary = 6;
  for (const int steps : {kDistinct, 3}) {
    ToyModel model(kVocabulary, steps);
    for (const std::int64_t beam : {1, 2, 4}) {
      for (const SearchOptions& options : penalties(beam)) {
        std::vector<SearchStart> starts;
        for (std::int32_t source = 0; source < 12; ++source)
          starts.push_back({.last = source, .max_tokens = 1 + source * 5 % 7});
        const std::vector<FoundSequence> found = find(model, starts, options);
        for (std::size_t i = 0; i < starts.size(); ++i) {
          const FoundSequence expected = by_the_rules(model, kVocabulary, starts[i], options);
          EXPECT_EQ(found[i].score, expected.score);
          EXPECT_EQ(found[i].ids, expected.ids);
          const FoundSequence alone = find(model, {starts[i]}, options)[0];
          EXPECT_EQ(found[i].ids, alone.ids);
          EXPECT_EQ(found[i].score, alone.score);
        }
      }
    }
  }
}

TEST(SequenceSearch, BeamOfOneIsGreedyWhateverThePenalty) {
  ToyModel model(5, kDistinct);
  for (std::int32_t source = 0; source < 20; ++source) {
    Ids greedy = generate(model, {source}, {.tokens = 9, .sampling = {.temperature = 0}});
    greedy.erase(std::find(greedy.begin(), greedy.end(), kEnd), greedy.end());
    for (const SearchOptions& options : penalties(1)) {
      Ids found = find(model, {{.last = source, .max_tokens = 9}}, options)[0].ids;
      if (found.back() == kEnd) found.pop_back();
      EXPECT_EQ(found, greedy);
    }
  }
}

// All ids are equally likely: the smallest ids win, and the end mark is the smallest.
TEST(SequenceSearch, TiesGoToTheSmallerId) {
  ToyModel model(4, 1);
  const SearchStart start{.last = 1, .max_tokens = 3};
  EXPECT_EQ(find(model, {start}, {.beam = 3, .end_mark = kEnd})[0].ids, Ids{kEnd});
  EXPECT_EQ(find(model, {start}, {.beam = 3})[0].ids, (Ids{0, 0, 0}));
}

TEST(SequenceSearch, StopsWhenAllSourcesAreDone) {
  ToyModel model(4, 1);
  find(model, {{.last = 1, .max_tokens = 90}, {.last = 2, .max_tokens = 90}}, {.end_mark = kEnd});
  EXPECT_EQ(model.num_steps, 1);
}

TEST(SequenceSearch, SamplesAreTheGeneratorsSamples) {
  ToyModel model(5, kDistinct);
  const Sampling sampling{.temperature = 0.7, .top_k = 3, .top_p = 0.9, .seed = 5};
  std::vector<SearchStart> starts;
  for (std::uint64_t text = 0; text < 10; ++text)
    starts.push_back({.last = 3, .max_tokens = 8, .text = text});
  const std::vector<FoundSequence> found =
      find(model, starts, {.end_mark = kEnd, .sampling = sampling});
  for (const SearchStart& start : starts) {
    const Ids text = generate(model, {3}, {.tokens = 8, .sampling = sampling, .text = start.text});
    const Ids& sampled = found[start.text].ids;
    EXPECT_TRUE(std::equal(sampled.begin(), sampled.end(), text.begin()));
    EXPECT_TRUE(sampled.size() == 8 || sampled.back() == kEnd);
    EXPECT_EQ(std::count(sampled.begin(), sampled.end() - 1, kEnd), 0);
  }
  EXPECT_NE(found[0].ids, found[1].ids);
}

TEST(SequenceSearch, BadOptionsAndValuesAreErrors) {
  ToyModel model(4, kDistinct);
  const auto code_of = [&](const SearchOptions& options) {
    try {
      find(model, {{.last = 1, .max_tokens = 2}}, options);
    } catch (const Error& error) {
      return error.code();
    }
    return ExitCode::kOk;
  };
  for (const SearchOptions& options :
       {SearchOptions{.beam = 0}, SearchOptions{.length_penalty = -1},
        SearchOptions{.length_penalty = std::nan("")}, SearchOptions{.length_offset = -1},
        SearchOptions{.beam = 2, .sampling = Sampling{}},
        SearchOptions{.sampling = Sampling{.top_p = 0}}}) {
    EXPECT_EQ(code_of(options), ExitCode::kUsage);
  }
  // Logits of a diverged model.
  class NotFinite final : public Decoder {
   public:
    at::Device device() const override { return at::kCPU; }
    std::unique_ptr<DecodeCache> decode_cache(std::int64_t batch) override {
      auto cache = std::make_unique<Histories>();
      cache->rows.resize(static_cast<std::size_t>(batch));
      return cache;
    }
    at::Tensor decode_step(DecodeCache&, const at::Tensor&) override {
      return at::full({1, 3}, NAN);
    }
    std::int64_t max_tokens() const override { return 9; }
  } diverged;
  try {
    find_sequences(diverged, diverged.decode_cache(1), {{.last = 1, .max_tokens = 2}}, {});
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kNumerical);
  }
}

}  // namespace
}  // namespace birkhoff
