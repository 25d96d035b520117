#include <google/protobuf/util/message_differencer.h>

#include <string>

#include "cluster/base/text/plural.h"
#include "configs/loader/check.h"
#include "configs/loader/message_text.h"

namespace birkhoff {
namespace {

void check_point_cloud_transformer(const configs::Config& config, const SourceLocations& places) {
  const auto& model = config.model();
  const int length = config.data().sequence_length(),
            neighbors = config.task().point_sets().point_cloud_transformer().neighbors();
  if (model.channels() % 4 != 0) {
    config_error(places, "model.channels",
                 "must be a multiple of 4 with point_cloud_transformer, is {}", model.channels());
  }
  if (length % 4 != 0) {
    config_error(places, "data.sequence_length",
                 "must be a multiple of 4 with point_cloud_transformer, which keeps half of the "
                 "points twice; is {}",
                 length);
  }
  if (neighbors > length / 2) {
    config_error(places, "task.point_sets.point_cloud_transformer.neighbors",
                 "{} are more than the {} from which the second stage takes them, half of "
                 "data.sequence_length; take fewer",
                 neighbors, counted(length / 2, "point"));
  }
  configs::Config plain;
  resolve(plain);
  const auto is_plain = [&](const char* field) {
    const google::protobuf::FieldDescriptor* of_model =
        configs::Model::descriptor()->FindFieldByName(field);
    google::protobuf::util::MessageDifferencer compare;
    return compare.CompareWithFields(model, plain.model(), {of_model}, {of_model});
  };
  for (const char* field : {"heads", "attention"}) {
    if (is_plain(field)) continue;
    config_error(places, join_path("model", field),
                 "has no effect with point_cloud_transformer, whose attention has one head and "
                 "task.point_sets.point_cloud_transformer.half_steps; leave it out");
  }
}

}  // namespace

void check_point_sets(const configs::Config& config, const SourceLocations& places) {
  const auto& sets = config.task().point_sets();
  const auto& model = config.model();
  if (config.mesh().tensor() > 1) {
    config_error(places, "mesh.tensor",
                 "must be 1 with task.point_sets, whose model is not divided; use more "
                 "data-parallel ranks or train.zero_stage");
  }
  if (model.feed_forward() != 4 * model.channels()) {
    config_error(places, "model.feed_forward",
                 "has no effect with task.point_sets, whose layers are as wide as "
                 "model.channels; leave it out");
  }
  if (sets.augment().rotation() > 0 && sets.dimensions() < 2) {
    config_error(places, "task.point_sets.augment.rotation",
                 "points with 1 coordinate cannot be rotated; leave it out");
  }
  if (sets.has_point_cloud_transformer()) check_point_cloud_transformer(config, places);
}

}  // namespace birkhoff
