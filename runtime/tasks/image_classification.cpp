#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randint.h>
#include <fmt/format.h>

#include <algorithm>

#include "cluster/base/error.h"
#include "cluster/base/text/plural.h"
#include "data/loader/image_records.h"
#include "models/embeddings/patch_embedding.h"
#include "models/sequence_classifier.h"
#include "runtime/tasks/images.h"
#include "runtime/tasks/labels.h"
#include "runtime/tasks/task.h"

namespace birkhoff {
namespace {

constexpr char kTask[] = "task.image_classification";

Pooling image_pooling(configs::ImageClassification::Pooling pooling) {
  switch (pooling) {
    case configs::ImageClassification::class_token:
      return Pooling::kFirst;
    case configs::ImageClassification::mean:
      return Pooling::kMean;
    case configs::ImageClassification::max:
      return Pooling::kMax;
  }
  require(false, "task.image_classification.pooling has a value outside its enum");
  return {};
}

// Predicts the label of each image.
class ImageClassificationTask final : public Task {
 public:
  explicit ImageClassificationTask(const configs::Config& config) : config_(config) {}

  ModelInputs inputs(const Corpus& corpus, const std::string& split) const override {
    return {.vocabulary = 0,
            .class_names = classes_of(corpus, split, task().label()),
            .image = image_dims(corpus, split, task().image())};
  }
  ModelInputs inputs(std::int64_t) const override {
    return {.vocabulary = 0,
            .class_names = numbered_classes(task().classes()),
            .image = shape_without_corpus()};
  }
  std::optional<std::int64_t> own_vocabulary() const override { return 0; }
  std::unique_ptr<Model> make_model(const ModelInputs& inputs,
                                    const ModelPlacement& place) const override {
    require(inputs.image.has_value(), "a classifier of images reads images");
    check_classes(kTask, task().classes(), task().label(), inputs.class_names);
    check_shape(*inputs.image);
    check_constants(*inputs.image);
    return std::make_unique<SequenceClassifier>(
        config_,
        [&](Parameters& parameters) {
          return std::make_unique<PatchEmbedding>(config_, *inputs.image, parameters);
        },
        image_pooling(task().pooling()), task().classes(), place);
  }

  std::unique_ptr<SampleSource> training_source(const Corpus& corpus) const override {
    ImageRecordOptions changing = options(kTrainSplit);
    changing.shift = task().augment().shift();
    changing.flip = task().augment().flip();
    return source(corpus, changing);
  }
  void check_source(const Corpus& corpus) const override {
    check_image_records(corpus, options(kTrainSplit));
  }
  std::unique_ptr<SampleSource> evaluation_source(const Corpus& corpus,
                                                  const std::string& split) const override {
    return source(corpus, options(split));
  }
  std::unique_ptr<Targets> evaluation_targets(const Corpus&, const std::string&,
                                              std::int64_t num_samples) const override {
    return std::make_unique<LabelTargets>(num_samples, "image", task().classes());
  }

  Batch synthetic_batch(std::int64_t, at::Device device) const override {
    const at::Generator generator = at::detail::createCPUGenerator(config_.train().seed());
    Batch batch = synthetic_images(config_, shape_without_corpus(), generator, device);
    batch.fields.emplace(field::kLabels, at::randint(task().classes(), {batch.size()}, generator,
                                                     at::TensorOptions(at::kLong).device(device)));
    return batch;
  }

 private:
  const configs::ImageClassification& task() const { return config_.task().image_classification(); }
  std::int64_t class_tokens() const {
    return task().pooling() == configs::ImageClassification::class_token ? 1 : 0;
  }

  ImageRecordOptions options(const std::string& split) const {
    return {.split = split,
            .image = task().image(),
            .label = task().label(),
            .seed = config_.train().seed()};
  }
  std::unique_ptr<SampleSource> source(const Corpus& corpus,
                                       const ImageRecordOptions& of_split) const {
    check_image_records(corpus, of_split);
    check_shape(image_dims(corpus, of_split.split, of_split.image));
    return image_records(corpus, of_split);
  }

  void check_shape(const ImageDims& shape) const {
    const std::int64_t patch = task().patch();
    if (shape.rows % patch != 0 || shape.columns % patch != 0) {
      fail(ExitCode::kConfig,
           "{}.patch: {} does not divide {} rows and {} columns of the images; choose a common "
           "divisor",
           kTask, patch, shape.rows, shape.columns);
    }
    const std::int64_t patches = (shape.rows / patch) * (shape.columns / patch);
    check_length(
        config_, patches + class_tokens(),
        fmt::format("an image of {} has {}{}", shape.text(), counted(patches, "patch", "patches"),
                    class_tokens() > 0 ? " and the class token" : ""));
    const std::int64_t shift = task().augment().shift();
    if (shift >= std::min(shape.rows, shape.columns)) {
      fail(ExitCode::kConfig,
           "{}.augment.shift: {} moves images of {} x {} pixels out of sight; set at most {}",
           kTask, shift, shape.rows, shape.columns, std::min(shape.rows, shape.columns) - 1);
    }
  }
  void check_constants(const ImageDims& shape) const {
    for (const auto& [name, values] :
         {std::pair("pixel_mean", &task().pixel_mean()), {"pixel_std", &task().pixel_std()}}) {
      if (values->size() <= 1 || values->size() == shape.channels) continue;
      fail(ExitCode::kConfig, "{}.{}: has {}, but images have {}; give one value, or one for each",
           kTask, name, counted(values->size(), "value"), counted(shape.channels, "channel"));
    }
  }

  // Of as many patches as data.sequence_length says. The channels are those of the constants, of
  // which color images usually have three.
  ImageDims shape_without_corpus() const {
    const std::int64_t patches = config_.data().sequence_length() - class_tokens();
    if (patches < 1) {
      fail(ExitCode::kConfig,
           "data.sequence_length: is {}, but an image has a patch and the class token; set it to "
           "the number of patches plus 1",
           config_.data().sequence_length());
    }
    const ImageDims in_patches = shape_of_area(patches, 1);
    return {in_patches.rows * task().patch(), in_patches.columns * task().patch(),
            std::max({1, task().pixel_mean_size(), task().pixel_std_size()})};
  }

  const configs::Config config_;
};

}  // namespace

std::unique_ptr<Task> make_image_classification_task(const configs::Config& config) {
  return std::make_unique<ImageClassificationTask>(config);
}

}  // namespace birkhoff
