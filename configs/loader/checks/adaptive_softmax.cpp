#include "cluster/base/text/plural.h"
#include "configs/loader/check.h"
#include "configs/loader/message_text.h"

namespace birkhoff {
namespace {

constexpr char kCutoff[] = "model.adaptive_softmax.cutoff";

void check_parts(const configs::Model& model, const SourceLocations& places) {
  const auto& adaptive = model.adaptive_softmax();
  int width = model.channels();
  for (int i = 0; i < adaptive.cutoff_size(); ++i) {
    if (i > 0 && adaptive.cutoff(i) <= adaptive.cutoff(i - 1)) {
      config_error(places, kCutoff + std::string(".") + std::to_string(i),
                   "{} is not above {}; cutoffs must be ascending", adaptive.cutoff(i),
                   adaptive.cutoff(i - 1));
    }
    width /= adaptive.divisor();
    if (width == 0) {
      config_error(
          places, "model.adaptive_softmax.divisor",
          "{} is too large for model.channels {}: the last of {} would have no channels; use a "
          "smaller divisor, or fewer cutoffs",
          adaptive.divisor(), model.channels(), counted(i + 1, "tail"));
    }
  }
}

}  // namespace

void check_adaptive_softmax(const configs::Config& config, const SourceLocations& places) {
  const auto& model = config.model();
  const auto& adaptive = model.adaptive_softmax();
  const auto require_unset = [&](bool unset, const char* field, const char* why) {
    if (!unset) config_error(places, field, "{}", why);
  };
  const char* const tie_projections = "model.adaptive_softmax.tie_projections";
  if (adaptive.cutoff().empty()) {
    const char* const why = "has no effect without model.adaptive_softmax.cutoff; leave it out";
    const configs::AdaptiveSoftmax plain;
    require_unset(adaptive.divisor() == plain.divisor(), "model.adaptive_softmax.divisor", why);
    require_unset(adaptive.inputs() == plain.inputs(), "model.adaptive_softmax.inputs", why);
    require_unset(!adaptive.tie_projections(), tie_projections, why);
    return;
  }
  require_unset(config.task().has_language_model(), kCutoff,
                "is for task.language_model; leave it out");
  check_parts(model, places);
  require_unset(model.embedding_channels() == 0 || model.embedding_channels() == model.channels(),
                "model.embedding_channels",
                "must be 0 with model.adaptive_softmax, whose head is as wide as the model; leave "
                "one of them out");
  require_unset(adaptive.inputs() || !model.tie_embeddings(), "model.tie_embeddings",
                "must be false with model.adaptive_softmax.inputs: false, whose one embedding "
                "table has no parts");
  require_unset(!adaptive.tie_projections() || (adaptive.inputs() && model.tie_embeddings()),
                tie_projections,
                "needs model.adaptive_softmax.inputs and model.tie_embeddings, so that the "
                "embedding has the same parts; set both to true, or leave it out");
  require_unset(!adaptive.tie_projections() || adaptive.divisor() > 1, tie_projections,
                "has no effect with model.adaptive_softmax.divisor 1, whose parts have no "
                "projections; leave it out");
  require_unset(config.mesh().tensor() == 1, "mesh.tensor",
                "must be 1 with model.adaptive_softmax, whose parts are not divided; use more "
                "data-parallel ranks or train.zero_stage");
  require_unset(!config.train().cuda_graph(), "train.cuda_graph",
                "must be false with model.adaptive_softmax, whose tails have other numbers of "
                "tokens in each step; leave one of them out");
}

}  // namespace birkhoff
