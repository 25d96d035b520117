#include "data/loader/labelled_documents.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/narrow.h>

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
        trim_(options.trim) {}

  std::int64_t num_samples() const override { return labels_.rows(); }
  bool lengths_vary() const override { return true; }
  SampleLength length(std::int64_t sample) override { return {.source = texts_.length_of(sample)}; }

  Batch make_batch(std::int64_t rows) const override {
    const at::TensorOptions ids(at::kLong);
    Batch batch;
    batch.fields.emplace(field::kInputs, at::empty({rows, texts_.length()}, ids));
    batch.fields.emplace(field::kLengths, at::empty({rows}, ids));
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
      *lengths++ = texts_.read(row.sample, tokens);
      tokens += texts_.length();
      labels_.read(row.sample, 1, labels++);
      *sample_ids++ = row.id;
    }
  }

  bool trims() const override { return trim_; }
  Batch trimmed(Batch batch, const SampleLength& longest) const override {
    if (!trim_) return batch;
    at::Tensor& inputs_BT = batch.fields.find(field::kInputs)->second;
    inputs_BT = inputs_BT.narrow(1, 0, longest.source);
    return batch;
  }

 private:
  DocumentRows texts_;
  LabelReader labels_;
  bool trim_;
};

}  // namespace

std::int64_t count_cut_documents(const Corpus& corpus, const DocumentOptions& options) {
  const auto lengths = document_lengths(corpus, options.split, options.stream);
  std::int64_t num_cut = 0;
  for (auto each = lengths.upper_bound(options.sequence_length); each != lengths.end(); ++each) {
    num_cut += each->second;
  }
  return num_cut;
}

void check_labelled_documents(const Corpus& corpus, const DocumentOptions& options) {
  corpus.stream(options.split, options.stream);
  check_labels(corpus, options.split, options.label);
  check_has_documents(corpus, options.split);
}

std::unique_ptr<SampleSource> labelled_documents(const Corpus& corpus,
                                                 const DocumentOptions& options) {
  check_labelled_documents(corpus, options);
  return std::make_unique<LabelledDocuments>(corpus, options);
}

}  // namespace birkhoff
