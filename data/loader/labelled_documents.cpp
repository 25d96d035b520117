#include "data/loader/labelled_documents.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/narrow.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "cluster/base/error.h"
#include "data/corpus/label_reader.h"
#include "data/loader/document_rows.h"

namespace birkhoff {
namespace {

class LabelledDocuments : public SampleSource {
 public:
  LabelledDocuments(const Corpus& corpus, const DocumentOptions& options)
      : texts_(corpus, options.split, options.stream, options.sequence_length),
        labels_(corpus, options.split, options.label),
        trim_(options.trim),
        joined_(options.joined) {
    if (options.second_stream.empty()) return;
    second_.emplace(corpus, options.split, options.second_stream, options.sequence_length);
    end_mark_ = corpus.tokenizer_entry(options.stream).end_of_document();
  }

  std::int64_t num_samples() const override { return labels_.rows(); }
  bool lengths_vary() const override { return true; }
  SampleLength length(std::int64_t sample) override {
    if (!second_) return {.source = texts_.length_of(sample)};
    if (joined_) {
      const PairLengths lengths = lengths_of(sample);
      return {.source = lengths.first + lengths.second};
    }
    return {.source = texts_.length_of(sample), .target = second_->length_of(sample)};
  }

  Batch make_batch(std::int64_t rows) const override {
    const at::TensorOptions ids(at::kLong);
    Batch batch;
    std::vector<std::int64_t> shape = {rows};
    if (has_two_sequences()) shape.push_back(2);
    batch.fields.emplace(field::kLengths, at::empty(shape, ids));
    shape.push_back(texts_.length());
    batch.fields.emplace(field::kInputs, at::empty(shape, ids));
    batch.fields.emplace(field::kLabels, at::empty({rows}, ids));
    batch.sample_ids_B = at::empty({rows}, ids);
    return batch;
  }

  void fill(Batch& batch, const std::vector<Row>& rows) override {
    require(static_cast<std::int64_t>(rows.size()) == batch.size(), "one Row per row of the batch");
    auto* tokens = batch.at(field::kInputs).mutable_data_ptr<std::int64_t>();
    auto* lengths = batch.at(field::kLengths).mutable_data_ptr<std::int64_t>();
    auto* labels = batch.at(field::kLabels).mutable_data_ptr<std::int64_t>();
    auto* sample_ids = batch.sample_ids_B.mutable_data_ptr<std::int64_t>();
    for (const Row& row : rows) {
      *lengths++ =
          second_ && joined_ ? read_joined(row.sample, tokens) : texts_.read(row.sample, tokens);
      tokens += texts_.length();
      if (has_two_sequences()) {
        *lengths++ = second_->read(row.sample, tokens);
        tokens += texts_.length();
      }
      labels_.read(row.sample, 1, labels++);
      *sample_ids++ = row.id;
    }
  }

  bool trims() const override { return trim_; }
  Batch trimmed(Batch batch, const SampleLength& longest) const override {
    if (!trim_) return batch;
    at::Tensor& inputs = batch.fields.find(field::kInputs)->second;
    inputs = inputs.narrow(-1, 0, longest.longest());
    return batch;
  }

 private:
  bool has_two_sequences() const { return second_ && !joined_; }

  PairLengths lengths_of(std::int64_t sample) {
    return joined_lengths({texts_.whole_length_of(sample), second_->whole_length_of(sample)},
                          texts_.length());
  }

  // Writes a pair as one sequence to row[0, T) and returns the number of its tokens.
  std::int64_t read_joined(std::int64_t sample, std::int64_t* row) {
    const auto [first, second] = lengths_of(sample);
    texts_.read_first(sample, first, row);
    second_->read_first(sample, second, row + first);
    // A text that was cut has lost it.
    row[first - 1] = row[first + second - 1] = end_mark_;
    std::fill(row + first + second, row + texts_.length(), 0);
    return first + second;
  }

  DocumentRows texts_;
  std::optional<DocumentRows> second_;
  LabelReader labels_;
  bool trim_, joined_;
  std::int64_t end_mark_ = 0;  // of pairs
};

}  // namespace

PairLengths joined_lengths(PairLengths tokens, std::int64_t length) {
  require(length >= 2, "a sequence of two texts");
  const std::int64_t second = std::min(tokens.second, std::max(length - tokens.first, length / 2));
  return {std::min(tokens.first, length - second), second};
}

std::int64_t count_cut_documents(const Corpus& corpus, const DocumentOptions& options) {
  DocumentLengths texts(corpus, options.split, options.stream);
  std::optional<DocumentLengths> second;
  if (!options.second_stream.empty()) second.emplace(corpus, options.split, options.second_stream);
  std::int64_t num_cut = 0;
  while (const auto text = texts.next()) {
    const std::int64_t other = second ? second->next().value_or(0) : 0;
    num_cut += (options.joined ? *text + other : std::max(*text, other)) > options.sequence_length;
  }
  return num_cut;
}

namespace {

void check_pairs(const Corpus& corpus, const DocumentOptions& options) {
  // Streams of a split have the same number of documents (data/corpus/manifest.h).
  corpus.stream(options.split, options.second_stream);
  const auto& entry = corpus.tokenizer_entry(options.stream);
  if (entry.SerializeAsString() !=
      corpus.tokenizer_entry(options.second_stream).SerializeAsString()) {
    fail(ExitCode::kData,
         "{}: the streams '{}' and '{}' have different tokenizers, but a classifier of pairs reads "
         "both with one; prepare a table of pairs (birkhoff prepare --second-column)",
         corpus.folder().string(), options.stream, options.second_stream);
  }
  require(entry.has_end_of_document(), "texts of pairs have end marks");
}

}  // namespace

void check_labelled_documents(const Corpus& corpus, const DocumentOptions& options) {
  corpus.stream(options.split, options.stream);
  if (!options.second_stream.empty()) check_pairs(corpus, options);
  check_labels(corpus, options.split, options.label);
  check_has_documents(corpus, options.split);
}

std::unique_ptr<SampleSource> labelled_documents(const Corpus& corpus,
                                                 const DocumentOptions& options) {
  check_labelled_documents(corpus, options);
  return std::make_unique<LabelledDocuments>(corpus, options);
}

}  // namespace birkhoff
