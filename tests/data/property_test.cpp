// Properties of sampling order and packing over random sizes, documents and options, against a
// simple model of both.
//
// Legend: B batch, T tokens.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "data/loader/loader.h"
#include "data/loader/sampler.h"
#include "data/loader/token_windows.h"
#include "tests/data/helpers.h"

namespace birkhoff {
namespace {

RC_GTEST_PROP(OrderProperty, IsAPermutationOfEachEpoch, (std::uint64_t seed)) {
  const auto n = *rc::gen::inRange<std::int64_t>(1, 3000);
  const auto epoch = *rc::gen::inRange<std::int64_t>(0, std::int64_t{1} << 40);
  const Sampler order(seed, epoch, n), next(seed, epoch + 1, n);
  std::vector<bool> seen(static_cast<std::size_t>(n));
  bool differs = false;
  for (std::int64_t place = 0; place < n; ++place) {
    const std::int64_t sample = order.at(place);
    RC_ASSERT(sample >= 0 && sample < n);
    RC_ASSERT(!seen[static_cast<std::size_t>(sample)]);
    seen[static_cast<std::size_t>(sample)] = true;
    differs = differs || next.at(place) != sample;
  }
  RC_ASSERT(differs || n < 20);  // a chance of 1/20! never happens
  const auto length = *rc::gen::inRange<std::int64_t>(1, 1 << 20);
  const std::int64_t shift = epoch_shift(seed, epoch, length);
  RC_ASSERT(shift >= 0 && shift < length);
  RC_ASSERT(epoch_shift(seed, 0, length) == 0);
}

// A corpus of bytes, with its tokens and document ends known without reading it.
struct Packed {
  std::unique_ptr<TemporaryFolder> folder = std::make_unique<TemporaryFolder>();
  std::vector<std::int64_t> tokens, ends;
  std::unique_ptr<Corpus> corpus;
};

constexpr std::int64_t kEndMark = 256;

Packed pack(std::uint32_t seed) {
  std::mt19937 random(seed);
  Packed packed;
  const int num_documents = seed == 0 ? 1 : 2 + static_cast<int>(random() % 30);
  for (int i = 0; i < num_documents; ++i) {
    std::string text(num_documents == 1 ? 400 : 1 + random() % (i % 5 == 0 ? 90 : 9), '\0');
    for (char& c : text) {
      c = static_cast<char>(random());
      packed.tokens.push_back(static_cast<unsigned char>(c));
    }
    if (num_documents > 1) packed.tokens.push_back(kEndMark);
    packed.ends.push_back(static_cast<std::int64_t>(packed.tokens.size()));
    write_text(*packed.folder / fmt::format("in/{:03}", i), text);
  }
  PrepareOptions options = prepare_options(*packed.folder / "corpus", {*packed.folder / "in"});
  options.valid_fraction = 0;
  options.shard_tokens = 1 + static_cast<std::int64_t>(random() % 60);
  prepare_corpus(options);
  packed.corpus = std::make_unique<Corpus>(*packed.folder / "corpus");
  return packed;
}

const Packed& corpus_of(std::size_t index) {
  static const std::vector<Packed> all = [] {
    std::vector<Packed> packed;
    for (std::uint32_t seed = 0; seed < 6; ++seed) packed.push_back(pack(seed));
    return packed;
  }();
  return all[index];
}

// Row `b` must be the window of T tokens from `first` on, padded after the end of the stream.
void check_row(const Packed& packed, const Batch& batch, std::int64_t b, std::int64_t first,
               bool restart) {
  const std::int64_t length = batch.at(field::kInputs).size(1);
  const auto* inputs = batch.at(field::kInputs).select(0, b).const_data_ptr<std::int64_t>();
  const auto* targets = batch.at(field::kTargets).select(0, b).const_data_ptr<std::int64_t>();
  const auto* mask = batch.at(field::kMask).select(0, b).const_data_ptr<std::uint8_t>();
  const auto num_tokens = static_cast<std::int64_t>(packed.tokens.size());
  const auto token = [&](std::int64_t t) { return packed.tokens[static_cast<std::size_t>(t)]; };
  std::int64_t segment = 0, start = first;
  for (std::int64_t t = 0; t < length; ++t) {
    const bool inside = first + t + 1 < num_tokens;
    RC_ASSERT(inputs[t] == (first + t < num_tokens ? token(first + t) : 0));
    RC_ASSERT(targets[t] == (inside ? token(first + t + 1) : 0));
    RC_ASSERT(mask[t] == (inside ? 1 : 0));
    if (!restart || !inside) continue;
    if (t > 0 && std::binary_search(packed.ends.begin(), packed.ends.end(), first + t)) {
      ++segment;
      start = first + t;
    }
    RC_ASSERT(batch.at(field::kSegments).const_data_ptr<std::int32_t>()[b * length + t] == segment);
    RC_ASSERT(batch.at(field::kPositions).const_data_ptr<std::int64_t>()[b * length + t] ==
              first + t - start);
  }
}

RC_GTEST_PROP(PackingProperty, RowsAreTheWindowsOfTheirSamples, (std::uint64_t seed)) {
  const Packed& packed = corpus_of(*rc::gen::inRange<std::size_t>(0, 6));
  const auto num_tokens = static_cast<std::int64_t>(packed.tokens.size());
  WindowOptions windows;
  LoaderOptions options;
  windows.seed = options.batches.seed = seed;
  windows.sequence_length =
      *rc::gen::inRange<std::int64_t>(1, std::min<std::int64_t>(num_tokens, 60));
  options.batches.global_batch = *rc::gen::inRange<std::int64_t>(1, 12);
  options.batches.size = *rc::gen::inRange(1, 4);
  windows.restart_at_documents = *rc::gen::arbitrary<bool>();
  windows.shift_windows = *rc::gen::arbitrary<bool>();
  options.prefetch = *rc::gen::inRange(1, 4);
  const auto consumed = *rc::gen::inRange<std::int64_t>(0, 5000);
  const std::int64_t per_epoch = num_training_windows(*packed.corpus, windows);
  RC_ASSERT(per_epoch == (num_tokens - 1) / windows.sequence_length);
  std::vector<std::unique_ptr<TrainLoader>> loaders;
  BatchPlanOptions& plan = options.batches;
  for (plan.rank = 0; plan.rank < plan.size; ++plan.rank) {
    loaders.push_back(std::make_unique<TrainLoader>(training_windows(*packed.corpus, windows),
                                                    options, consumed));
  }
  std::int64_t sample = consumed;
  for (int step = 0; step < 2; ++step) {
    for (const auto& loader : loaders) {
      const Batch batch = loader->next();
      for (std::int64_t b = 0; b < batch.size(); ++b, ++sample) {
        RC_ASSERT(batch.sample_ids_B.const_data_ptr<std::int64_t>()[b] == sample);
        const std::int64_t epoch = sample / per_epoch;
        const std::int64_t shift =
            windows.shift_windows ? epoch_shift(seed, epoch, windows.sequence_length) : 0;
        const std::int64_t first =
            Sampler(seed, epoch, per_epoch).at(sample % per_epoch) * windows.sequence_length +
            shift;
        check_row(packed, batch, b, std::min(first, num_tokens - windows.sequence_length - 1),
                  windows.restart_at_documents);
      }
    }
  }
  RC_ASSERT(sample == consumed + 2 * options.batches.global_batch);
}

RC_GTEST_PROP(PackingProperty, WindowsOfAnEvaluationFollowEachOther, ()) {
  const Packed& packed = corpus_of(*rc::gen::inRange<std::size_t>(0, 6));
  WindowOptions options;
  options.sequence_length = *rc::gen::inRange<std::int64_t>(1, 500);
  options.restart_at_documents = *rc::gen::arbitrary<bool>();
  options.with_documents = true;
  const auto windows = evaluation_windows(*packed.corpus, options);
  const Batch batch = read_samples(*windows, 0, windows->num_samples());
  const auto num_tokens = static_cast<std::int64_t>(packed.tokens.size());
  const at::Tensor documents_N = batch.at(field::kDocuments).flatten();
  for (std::int64_t b = 0; b < batch.size(); ++b) {
    check_row(packed, batch, b, b * options.sequence_length, options.restart_at_documents);
  }
  for (std::int64_t t = 1; t < num_tokens; ++t) {
    const std::int64_t document = std::ranges::upper_bound(packed.ends, t) - packed.ends.begin();
    RC_ASSERT(documents_N.const_data_ptr<std::int64_t>()[t - 1] == document);
  }
}

}  // namespace
}  // namespace birkhoff
