#include "runtime/tasks/task.h"

#include "cluster/base/error.h"
#include "data/loader/token_windows.h"

namespace birkhoff {
namespace {

WindowOptions window_options(const configs::Config& config, const std::string& split) {
  return {.split = split,
          .stream = text_stream(config),
          .sequence_length = config.data().sequence_length(),
          .restart_at_documents = config.data().restart_at_documents(),
          .shift_windows = config.data().shift_windows(),
          .seed = config.train().seed()};
}

}  // namespace

const std::string& text_stream(const configs::Config& config) {
  require(config.task().has_language_model(), "make_model() accepted the task");
  return config.task().language_model().stream();
}

std::unique_ptr<SampleSource> training_source(const configs::Config& config, const Corpus& corpus) {
  return training_windows(corpus, window_options(config, "train"));
}

std::unique_ptr<SampleSource> evaluation_source(const configs::Config& config,
                                                const std::string& split, const Corpus& corpus) {
  return evaluation_windows(corpus, window_options(config, split));
}

void check_source(const configs::Config& config, const Corpus& corpus) {
  num_training_windows(corpus, window_options(config, "train"));
}

}  // namespace birkhoff
