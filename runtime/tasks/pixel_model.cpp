#include "models/pixel_model.h"

#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>

#include <cmath>
#include <numbers>

#include "cluster/base/error.h"
#include "cluster/base/text/number_text.h"
#include "data/loader/image_records.h"
#include "runtime/tasks/images.h"
#include "runtime/tasks/task.h"

namespace birkhoff {
namespace {

// The values of images.
class ValueTargets final : public Targets {
 public:
  explicit ValueTargets(std::int64_t count) : count_(count) {}
  std::string unit() const override { return "value"; }
  std::int64_t count() const override { return count_; }
  TaskFigures figures(double nats) const override {
    const double bits = nats / (std::numbers::ln2 * static_cast<double>(count_));
    TaskFigures result;
    result.figures = {{"bits_per_dim", bits, fmt::format("{} bits per dim", fixed_text(bits, 4))}};
    return result;
  }

 private:
  const std::int64_t count_;
};

// Predicts each value of an image from those before it.
class PixelModelTask final : public Task {
 public:
  explicit PixelModelTask(const configs::Config& config) : config_(config) {}

  ModelInputs inputs(const Corpus& corpus, const std::string& split) const override {
    return {.vocabulary = PixelModel::kVocabulary,
            .class_names = {},
            .image = image_dims(corpus, split, task().image())};
  }
  ModelInputs inputs(std::int64_t) const override {
    return {
        .vocabulary = PixelModel::kVocabulary, .class_names = {}, .image = shape_without_corpus()};
  }
  std::optional<std::int64_t> own_vocabulary() const override { return PixelModel::kVocabulary; }
  std::unique_ptr<Model> make_model(const ModelInputs& inputs,
                                    const ModelPlacement& place) const override {
    require(inputs.image.has_value(), "a pixel model reads images");
    check_shape(*inputs.image);
    return std::make_unique<PixelModel>(config_, *inputs.image, place);
  }

  std::unique_ptr<SampleSource> training_source(const Corpus& corpus) const override {
    return evaluation_source(corpus, kTrainSplit);
  }
  void check_source(const Corpus& corpus) const override {
    check_image_records(corpus, options(kTrainSplit));
  }
  std::unique_ptr<SampleSource> evaluation_source(const Corpus& corpus,
                                                  const std::string& split) const override {
    check_image_records(corpus, options(split));
    check_shape(image_dims(corpus, split, task().image()));
    return image_records(corpus, options(split));
  }
  std::unique_ptr<Targets> evaluation_targets(const Corpus&, const std::string&,
                                              std::int64_t num_samples) const override {
    return std::make_unique<ValueTargets>(num_samples * config_.data().sequence_length());
  }

  Batch synthetic_batch(std::int64_t, at::Device device) const override {
    return synthetic_images(config_, shape_without_corpus(),
                            at::detail::createCPUGenerator(config_.train().seed()), device);
  }

 private:
  const configs::PixelModel& task() const { return config_.task().pixel_model(); }

  ImageRecordOptions options(const std::string& split) const {
    return {.split = split, .image = task().image(), .label = "", .seed = config_.train().seed()};
  }
  void check_shape(const ImageDims& shape) const {
    check_length(config_, shape.values(),
                 fmt::format("an image of {} has {} values", shape.text(), shape.values()));
  }
  // Of as many values as data.sequence_length says: of colors, if these make a square.
  ImageDims shape_without_corpus() const {
    const std::int64_t values = config_.data().sequence_length();
    const ImageDims colored = shape_of_area(values / 3, 3);
    return values % 3 == 0 && colored.rows == colored.columns ? colored : shape_of_area(values, 1);
  }

  const configs::Config config_;
};

}  // namespace

std::unique_ptr<Task> make_pixel_model_task(const configs::Config& config) {
  return std::make_unique<PixelModelTask>(config);
}

}  // namespace birkhoff
