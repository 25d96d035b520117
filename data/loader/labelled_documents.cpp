#include "data/loader/labelled_documents.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <vector>

#include "cluster/base/error.h"
#include "data/corpus/label_reader.h"
#include "data/corpus/shard_reader.h"

namespace birkhoff {
namespace {

class LabelledDocuments : public SampleSource {
 public:
  LabelledDocuments(const Corpus& corpus, const DocumentOptions& options)
      : texts_(corpus, options.split, options.stream),
        labels_(corpus, options.split, options.label),
        length_(options.sequence_length) {
    require(length_ >= 1, "sequence length");
  }

  std::int64_t num_samples() const override { return labels_.rows(); }

  Batch make_batch(std::int64_t rows) const override {
    const at::TensorOptions ids(at::kLong);
    Batch batch;
    batch.fields.emplace(field::kInputs, at::empty({rows, length_}, ids));
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
      const auto [begin, end] = texts_.document(row.sample);
      const std::int64_t count = std::min(end - begin, length_);
      texts_.read(begin, count, tokens);
      std::fill(tokens + count, tokens + length_, 0);
      tokens += length_;
      *lengths++ = count;
      labels_.read(row.sample, 1, labels++);
      *sample_ids++ = row.id;
    }
  }

 private:
  StreamReader texts_;
  LabelReader labels_;
  std::int64_t length_;
};

}  // namespace

std::map<std::int64_t, std::int64_t> document_lengths(const Corpus& corpus,
                                                      const std::string& split,
                                                      const std::string& stream) {
  StreamReader texts(corpus, split, stream);
  std::map<std::int64_t, std::int64_t> lengths;
  std::int64_t begin = 0;
  // Documents are read in chunks, so that memory does not depend on their number.
  constexpr std::int64_t kStretch = 1 << 20;
  for (std::int64_t from = 0; from < texts.elements(); from += kStretch) {
    for (const std::int64_t end :
         texts.document_ends(from, std::min(from + kStretch, texts.elements()))) {
      ++lengths[end - begin];
      begin = end;
    }
  }
  return lengths;
}

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
  if (corpus.record(options.split, options.label).rows() > 0) return;
  fail(ExitCode::kData, "{}: split '{}' has no document; prepare more text",
       corpus.folder().string(), options.split);
}

std::unique_ptr<SampleSource> labelled_documents(const Corpus& corpus,
                                                 const DocumentOptions& options) {
  check_labelled_documents(corpus, options);
  return std::make_unique<LabelledDocuments>(corpus, options);
}

}  // namespace birkhoff
