// A small corpus, and loaders of its windows.
//
// Legend: B batch, T tokens.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/loader/loader.h"
#include "data/loader/token_windows.h"
#include "tests/data/helpers.h"

namespace birkhoff {

using Numbers = std::vector<std::int64_t>;

template <typename T>
std::vector<T> row(const Batch& batch, std::string_view name, std::int64_t index) {
  const at::Tensor field = batch.at(name).select(0, index);
  const T* begin = field.const_data_ptr<T>();
  return std::vector<T>(begin, begin + field.size(0));
}

inline Numbers sample_ids(const Batch& batch) {
  const auto* begin = batch.sample_ids_B.const_data_ptr<std::int64_t>();
  return Numbers(begin, begin + batch.size());
}

// A corpus of one document, with an odd shard size. The bytes are a function of their position, and
// no two runs of ten bytes are equal.
class LoaderTest : public testing::Test {
 protected:
  static constexpr std::int64_t kTokens = 1003;
  static unsigned char byte_at(std::int64_t i) {
    return static_cast<unsigned char>(static_cast<std::uint32_t>(i * i * 40503 + i * 2654435761) >>
                                      15);
  }

  LoaderTest() {
    std::string text;
    for (std::int64_t i = 0; i < kTokens; ++i) text += static_cast<char>(byte_at(i));
    write_text(folder_ / "text", text);
    PrepareOptions options = prepare_options(folder_ / "corpus", {folder_ / "text"});
    options.valid_fraction = 0;
    options.shard_tokens = 97;
    prepare_corpus(options);
    corpus_ = std::make_unique<Corpus>(folder_ / "corpus");
  }

  struct Options {
    WindowOptions windows;
    LoaderOptions loader;
  };
  static Options options(std::int64_t length, std::int64_t global_batch, int rank = 0,
                         int size = 1) {
    Options result;
    result.windows.sequence_length = length;
    result.windows.seed = result.loader.batches.seed = 11;
    result.loader.batches.global_batch = global_batch;
    result.loader.batches.rank = rank;
    result.loader.batches.size = size;
    return result;
  }
  struct WindowLoader : TrainLoader {
    WindowLoader(const Corpus& corpus, const Options& options, std::int64_t consumed)
        : TrainLoader(training_windows(corpus, options.windows), options.loader, consumed) {}
  };

  TemporaryFolder folder_;
  std::unique_ptr<Corpus> corpus_;
};

inline Numbers inputs_of(const Batch& batch) {
  const at::Tensor inputs_BT = batch.at(field::kInputs).contiguous();
  const auto* begin = inputs_BT.const_data_ptr<std::int64_t>();
  return Numbers(begin, begin + inputs_BT.numel());
}

}  // namespace birkhoff
