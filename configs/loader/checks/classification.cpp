#include <fmt/format.h>

#include "cluster/base/text/plural.h"
#include "configs/loader/check.h"
#include "configs/loader/message_text.h"

namespace birkhoff {
namespace {

void check_pairs(const configs::Config& config, const SourceLocations& places) {
  const auto& task = config.task().classification();
  if (task.second_stream().empty()) return;
  if (task.second_stream() == task.stream()) {
    config_error(places, "task.classification.second_stream",
                 "{} is also the stream of the first texts; name another one, or leave it out",
                 quoted(task.stream()));
  }
  if (task.pair_model() == configs::Classification::joined && config.data().sequence_length() < 2) {
    config_error(places, "data.sequence_length",
                 "must be at least 2 with task.classification.pair_model joined, whose sequences "
                 "hold two texts; is {}",
                 config.data().sequence_length());
  }
}

}  // namespace

void check_classification(const configs::Config& config, const SourceLocations& places) {
  const auto weights = static_cast<std::int64_t>(class_weights(config.task()).size());
  const int classes = class_count(config.task());
  if (weights > 0 && weights != classes) {
    config_error(places, fmt::format("task.{}.class_weight", chosen_member(config.task())->name()),
                 "has {}, but there are {}; give one for each class, or leave it out",
                 counted(weights, "value"), counted(classes, "class", "classes"));
  }
  if (config.task().has_classification()) check_pairs(config, places);
}

}  // namespace birkhoff
