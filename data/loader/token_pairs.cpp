// Legend: B batch, S tokens of a source, T tokens of a target.
#include "data/loader/token_pairs.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/narrow.h>

#include <algorithm>
#include <vector>

#include "cluster/base/error.h"
#include "data/loader/document_rows.h"

namespace birkhoff {
namespace {

class TokenPairs final : public SampleSource {
 public:
  TokenPairs(const Corpus& corpus, const PairOptions& options)
      : sources_(corpus, options.split, options.source, options.source_length),
        targets_(corpus, options.split, options.target, options.target_length),
        width_multiple_(options.width_multiple),
        end_mark_(corpus.tokenizer_entry(options.target).end_of_document()) {
    require(width_multiple_ >= 1, "the multiple of a batch's width");
  }

  std::int64_t num_samples() const override { return targets_.documents(); }
  bool lengths_vary() const override { return true; }
  SampleLength length(std::int64_t sample) override {
    return {.source = sources_.length_of(sample), .target = targets_.length_of(sample)};
  }

  Batch make_batch(std::int64_t rows) const override {
    const at::TensorOptions ids(at::kLong);
    Batch batch;
    batch.fields.emplace(field::kInputs, at::empty({rows, sources_.length()}, ids));
    batch.fields.emplace(field::kLengths, at::empty({rows}, ids));
    batch.fields.emplace(field::kPrevious, at::empty({rows, targets_.length()}, ids));
    batch.fields.emplace(field::kTargets, at::empty({rows, targets_.length()}, ids));
    batch.fields.emplace(field::kMask, at::empty({rows, targets_.length()}, at::kByte));
    batch.sample_ids_B = at::empty({rows}, ids);
    return batch;
  }

  void fill(Batch& batch, const std::vector<Row>& rows) override {
    require(static_cast<std::int64_t>(rows.size()) == batch.size(), "one Row per row of the batch");
    auto* inputs = batch.at(field::kInputs).mutable_data_ptr<std::int64_t>();
    auto* lengths = batch.at(field::kLengths).mutable_data_ptr<std::int64_t>();
    auto* previous = batch.at(field::kPrevious).mutable_data_ptr<std::int64_t>();
    auto* targets = batch.at(field::kTargets).mutable_data_ptr<std::int64_t>();
    auto* mask = batch.at(field::kMask).mutable_data_ptr<std::uint8_t>();
    auto* sample_ids = batch.sample_ids_B.mutable_data_ptr<std::int64_t>();
    const std::int64_t width = targets_.length();
    for (const Row& row : rows) {
      *lengths++ = sources_.read(row.sample, inputs);
      const std::int64_t count = targets_.read(row.sample, targets);
      *previous = end_mark_;
      std::copy_n(targets, count - 1, previous + 1);
      std::fill(previous + count, previous + width, end_mark_);
      std::fill_n(mask, count, std::uint8_t{1});
      std::fill(mask + count, mask + width, std::uint8_t{0});
      *sample_ids++ = row.id;
      inputs += sources_.length();
      for (std::int64_t** field : {&previous, &targets}) *field += width;
      mask += width;
    }
  }

  bool trims() const override { return width_multiple_ < longest_width(); }
  Batch trimmed(Batch batch, const SampleLength& longest) const override {
    if (!trims()) return batch;
    const auto narrow = [&](std::string_view name, std::int64_t length) {
      at::Tensor& field_BT = batch.fields.find(name)->second;
      const std::int64_t units = (length + width_multiple_ - 1) / width_multiple_;
      field_BT = field_BT.narrow(1, 0, std::min(units * width_multiple_, field_BT.size(1)));
    };
    narrow(field::kInputs, longest.source);
    for (const std::string_view name : {field::kPrevious, field::kTargets, field::kMask})
      narrow(name, longest.target);
    return batch;
  }

 private:
  std::int64_t longest_width() const { return std::max(sources_.length(), targets_.length()); }

  DocumentRows sources_, targets_;
  const std::int64_t width_multiple_, end_mark_;
};

}  // namespace

void check_token_pairs(const Corpus& corpus, const PairOptions& options) {
  // Streams of a split have the same number of documents (data/corpus/manifest.h).
  corpus.stream(options.split, options.source);
  corpus.stream(options.split, options.target);
  check_has_documents(corpus, options.split);
  if (!corpus.tokenizer_entry(options.target).has_end_of_document()) {
    fail(ExitCode::kData,
         "{}: the tokenizer of stream '{}' has no end mark, so no model could end a target; "
         "prepare pairs (birkhoff prepare --target)",
         corpus.folder().string(), options.target);
  }
}

std::unique_ptr<SampleSource> token_pairs(const Corpus& corpus, const PairOptions& options) {
  check_token_pairs(corpus, options);
  return std::make_unique<TokenPairs>(corpus, options);
}

std::int64_t count_cut_pairs(const Corpus& corpus, const PairOptions& options) {
  check_token_pairs(corpus, options);
  DocumentLengths sources(corpus, options.split, options.source);
  DocumentLengths targets(corpus, options.split, options.target);
  std::int64_t num_cut = 0;
  while (const auto source = sources.next()) {
    const auto target = targets.next();
    num_cut += *source > options.source_length || target.value_or(0) > options.target_length;
  }
  return num_cut;
}

}  // namespace birkhoff
