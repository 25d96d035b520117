#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>

#include "cluster/base/error.h"
#include "data/loader/point_records.h"
#include "models/point_cloud_transformer/point_cloud_transformer.h"
#include "models/set_transformer/set_transformer.h"
#include "runtime/tasks/labels.h"
#include "runtime/tasks/task.h"

namespace birkhoff {
namespace {

PointScaling point_scaling(configs::PointSets::Scaling scaling) {
  switch (scaling) {
    case configs::PointSets::as_stored:
      return PointScaling::kAsStored;
    case configs::PointSets::deviation:
      return PointScaling::kDeviation;
    case configs::PointSets::radius:
      return PointScaling::kRadius;
  }
  require(false, "task.point_sets.scaling has a value outside its enum");
  return {};
}

// Predicts the label of each point set.
class PointSetsTask final : public Task {
 public:
  explicit PointSetsTask(const configs::Config& config) : config_(config) {}

  ModelInputs inputs(const Corpus& corpus, const std::string& split) const override {
    return {.vocabulary = 0, .class_names = classes_of(corpus, split, task().label())};
  }
  ModelInputs inputs(std::int64_t) const override {
    return {.vocabulary = 0, .class_names = numbered_classes(task().classes())};
  }
  std::optional<std::int64_t> own_vocabulary() const override { return 0; }
  std::unique_ptr<Model> make_model(const ModelInputs& inputs,
                                    const ModelPlacement& place) const override {
    check_classes("task.point_sets", task().classes(), task().label(), inputs.class_names);
    if (task().has_point_cloud_transformer())
      return std::make_unique<PointCloudTransformer>(config_, place);
    return std::make_unique<SetTransformer>(config_, place);
  }

  std::unique_ptr<SampleSource> training_source(const Corpus& corpus) const override {
    PointRecordOptions changing = options(kTrainSplit);
    changing.resample = task().augment().resample();
    changing.rotation = task().augment().rotation();
    changing.min_scale = task().augment().min_scale();
    changing.max_scale = task().augment().max_scale();
    return point_records(corpus, changing);
  }
  void check_source(const Corpus& corpus) const override {
    check_point_records(corpus, options(kTrainSplit));
  }
  std::unique_ptr<SampleSource> evaluation_source(const Corpus& corpus,
                                                  const std::string& split) const override {
    return point_records(corpus, options(split));
  }
  std::unique_ptr<Targets> evaluation_targets(const Corpus&, const std::string&,
                                              std::int64_t num_samples) const override {
    return std::make_unique<LabelTargets>(num_samples, "set", task().classes());
  }

  Batch synthetic_batch(std::int64_t, at::Device device) const override {
    const std::int64_t size = config_.train().global_batch();
    const at::Generator generator = at::detail::createCPUGenerator(config_.train().seed());
    const auto on_device = [&](at::ScalarType dtype) {
      return at::TensorOptions(dtype).device(device);
    };
    Batch batch;
    batch.fields.emplace(field::kPoints,
                         at::randn({size, config_.data().sequence_length(), task().dimensions()},
                                   generator, on_device(at::kFloat)));
    batch.fields.emplace(field::kLabels,
                         at::randint(task().classes(), {size}, generator, on_device(at::kLong)));
    batch.sample_ids_B = at::arange(size, on_device(at::kLong));
    return batch;
  }

 private:
  const configs::PointSets& task() const { return config_.task().point_sets(); }

  PointRecordOptions options(const std::string& split) const {
    return {.split = split,
            .points = task().points(),
            .label = task().label(),
            .num_points = config_.data().sequence_length(),
            .dimensions = task().dimensions(),
            .scaling = point_scaling(task().scaling()),
            .seed = config_.train().seed()};
  }

  const configs::Config config_;
};

}  // namespace

std::unique_ptr<Task> make_point_sets_task(const configs::Config& config) {
  return std::make_unique<PointSetsTask>(config);
}

}  // namespace birkhoff
