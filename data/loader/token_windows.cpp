#include "data/loader/token_windows.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <vector>

#include "cluster/base/error.h"
#include "cluster/base/text/plural.h"
#include "data/corpus/shard_reader.h"
#include "data/loader/sampler.h"

namespace birkhoff {
namespace {

// The samples of training_windows() of a stream of that many tokens; 0: too few tokens.
std::int64_t training_samples(std::int64_t tokens, const WindowOptions& options) {
  const std::int64_t length = options.sequence_length;
  if (options.lanes == 0) return (tokens - 1) / length;
  // Parts stay whole in all epochs: none may pass the end of the stream, however it is shifted.
  const std::int64_t shift = options.shift_windows ? length - 1 : 0;
  return std::max<std::int64_t>(tokens - 1 - shift, 0) / (length * options.lanes) * options.lanes;
}

// Cuts windows out of the stream and writes them to the rows of a batch.
class TokenWindows : public SampleSource {
 public:
  TokenWindows(const Corpus& corpus, const WindowOptions& options, bool training)
      : reader_(corpus, options.split, options.stream),
        restart_(options.restart_at_documents),
        with_documents_(options.with_documents),
        has_end_mark_(corpus.manifest().tokenizer().has_end_of_document()),
        length_(options.sequence_length),
        step_(training ? options.sequence_length : options.step()),
        shifts_(training && options.shift_windows),
        seed_(options.seed) {
    require(length_ >= 1 && step_ >= 1 && step_ <= length_, "sequence length and stride");
    require(!training || !with_documents_, "documents of evaluation windows");
    const std::int64_t targets = reader_.elements() - 1;
    const std::int64_t after_first = std::max<std::int64_t>(targets - length_, 0);
    num_samples_ = training ? training_samples(reader_.elements(), options)
                            : 1 + (after_first + step_ - 1) / step_;
    last_first_ = training ? targets - length_ : (num_samples_ - 1) * step_;
  }

  std::int64_t num_samples() const override { return num_samples_; }

  Batch make_batch(std::int64_t rows) const override {
    Batch batch;
    const auto add = [&](std::string_view name, at::ScalarType type) {
      batch.fields.emplace(name, at::empty({rows, length_}, at::TensorOptions(type)));
    };
    // Inputs and targets share one storage, so that a row's tokens are stored once. They are not
    // views of one tensor: a view would hold its base, which BatchPool would take for a user's.
    const at::Tensor tokens_BT1 = at::empty({rows, length_ + 1}, at::TensorOptions(at::kLong));
    const auto add_tokens = [&](std::string_view name, std::int64_t offset) {
      batch.fields.emplace(
          name, at::empty({0}, tokens_BT1.options())
                    .set_(tokens_BT1.storage(), offset, {rows, length_}, {length_ + 1, 1}));
    };
    add_tokens(field::kInputs, 0);
    add_tokens(field::kTargets, 1);
    add(field::kMask, at::kByte);
    if (restart_) {
      add(field::kSegments, at::kInt);
      add(field::kPositions, at::kLong);
    }
    if (with_documents_) add(field::kDocuments, at::kLong);
    batch.sample_ids_B = at::empty({rows}, at::TensorOptions(at::kLong));
    return batch;
  }

  void will_fill(const std::vector<Row>& rows) override {
    for (const Row& row : rows) {
      const std::int64_t first = first_token(row);
      reader_.will_read(first, std::min(length_ + 1, reader_.elements() - first));
    }
  }

  // Pads rows after the end of the stream. The mask is 0 where there is no target, or where an
  // earlier window has it.
  void fill(Batch& batch, const std::vector<Row>& rows) override {
    require(static_cast<std::int64_t>(rows.size()) == batch.size(), "one Row per row of the batch");
    auto* tokens = batch.at(field::kInputs).mutable_data_ptr<std::int64_t>();  // and targets
    auto* mask = batch.at(field::kMask).mutable_data_ptr<std::uint8_t>();
    std::int32_t* segments = nullptr;
    std::int64_t* positions = nullptr;
    if (restart_) {
      segments = batch.at(field::kSegments).mutable_data_ptr<std::int32_t>();
      positions = batch.at(field::kPositions).mutable_data_ptr<std::int64_t>();
    }
    auto* documents =
        with_documents_ ? batch.at(field::kDocuments).mutable_data_ptr<std::int64_t>() : nullptr;
    auto* sample_ids = batch.sample_ids_B.mutable_data_ptr<std::int64_t>();
    batch.num_documents = 0;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const std::int64_t first = first_token(rows[i]);
      const std::int64_t count = std::min(length_ + 1, reader_.elements() - first);
      reader_.read(first, count, tokens);
      std::fill(tokens + count, tokens + length_ + 1, 0);
      const std::int64_t begin = rows[i].sample > 0 ? length_ - step_ : 0;
      std::fill(mask, mask + length_, std::uint8_t{0});
      std::fill(mask + begin, mask + (count - 1), std::uint8_t{1});
      sample_ids[i] = rows[i].id;
      if (restart_) {
        fill_documents(first, count, mask, segments, positions);
        batch.num_documents =
            std::max<std::int64_t>(batch.num_documents, segments[length_ - 1] + 1);
        segments += length_;
        positions += length_;
      }
      if (with_documents_) {
        number_documents(first + 1, count - 1, documents);
        documents += length_;
      }
      tokens += length_ + 1;
      mask += length_;
    }
  }

 private:
  std::int64_t first_token(const Row& row) const {
    const std::int64_t shift = shifts_ ? epoch_shift(seed_, row.epoch, length_) : 0;
    // If the shifted last window would pass the end of the stream, it starts earlier and shares
    // tokens with its neighbor.
    return std::min(row.sample * step_ + shift, last_first_);
  }

  void fill_documents(std::int64_t first, std::int64_t count, std::uint8_t* mask,
                      std::int32_t* segments, std::int64_t* positions) {
    const std::vector<std::int64_t> ends = reader_.document_ends(first, first + count - 1);
    auto end = ends.begin();
    std::int32_t segment = 0;
    std::int64_t start = first;
    for (std::int64_t t = 0; t < length_; ++t) {
      if (end != ends.end() && *end == first + t) {
        ++segment;
        start = *end++;
      }
      segments[t] = segment;
      positions[t] = first + t - start;
      // Without an end mark, nothing in this document predicts that the next one begins.
      if (!has_end_mark_ && end != ends.end() && *end == first + t + 1) mask[t] = 0;
    }
  }

  // The documents of tokens [first, first + count); those of padding are the last one.
  void number_documents(std::int64_t first, std::int64_t count, std::int64_t* documents) {
    const std::vector<std::int64_t> ends = reader_.document_ends(first, first + count - 1);
    auto end = ends.begin();
    std::int64_t document = reader_.document_of(first);
    for (std::int64_t t = 0; t < length_; ++t) {
      if (end != ends.end() && *end == first + t) {
        ++document;
        ++end;
      }
      if (t < count && document >= reader_.documents()) {
        fail(ExitCode::kData, "{}: token {} belongs to no document; prepare the corpus again",
             reader_.file_of(first + t), first + t);
      }
      documents[t] = document;
    }
  }

  StreamReader reader_;
  bool restart_, with_documents_, has_end_mark_;
  std::int64_t length_, step_, num_samples_ = 0, last_first_ = 0;
  bool shifts_;
  std::uint64_t seed_;
};

}  // namespace

std::int64_t num_training_windows(const Corpus& corpus, const WindowOptions& options) {
  const std::int64_t tokens = corpus.stream(options.split, options.stream).elements();
  const std::int64_t samples = training_samples(tokens, options);
  if (samples < 1 && options.lanes > 0) {
    fail(ExitCode::kData,
         "{}: split '{}' has {}, too few for a sequence of {} in each of the {} parts that "
         "model.memory reads; lower train.global_batch or data.sequence_length, or prepare more "
         "text",
         corpus.folder().string(), options.split, counted(tokens, "token"), options.sequence_length,
         options.lanes);
  }
  if (samples < 1) {
    fail(ExitCode::kData,
         "{}: split '{}' has {}, too few for one sample of {} and its last target; lower "
         "data.sequence_length or prepare more text",
         corpus.folder().string(), options.split, counted(tokens, "token"),
         options.sequence_length);
  }
  return samples;
}

std::unique_ptr<SampleSource> training_windows(const Corpus& corpus, const WindowOptions& options) {
  num_training_windows(corpus, options);
  return std::make_unique<TokenWindows>(corpus, options, /*training=*/true);
}

std::unique_ptr<SampleSource> evaluation_windows(const Corpus& corpus,
                                                 const WindowOptions& options) {
  const std::int64_t tokens = corpus.stream(options.split, options.stream).elements();
  if (tokens < 2) {
    fail(ExitCode::kData, "{}: split '{}' has {}, too few to predict one; prepare more text",
         corpus.folder().string(), options.split, counted(tokens, "token"));
  }
  return std::make_unique<TokenWindows>(corpus, options, /*training=*/false);
}

}  // namespace birkhoff
