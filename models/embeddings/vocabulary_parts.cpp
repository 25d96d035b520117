#include "models/embeddings/vocabulary_parts.h"

#include <ATen/ops/pow.h>

#include <cmath>

#include "cluster/base/error.h"
#include "configs/schema/config.pb.h"
#include "models/transformer/layers.h"

namespace birkhoff {

std::vector<VocabularyPart> vocabulary_parts(const configs::Model& config,
                                             std::int64_t vocabulary) {
  const configs::AdaptiveSoftmax& adaptive = config.adaptive_softmax();
  const int tails = adaptive.cutoff_size();
  if (tails > 0 && adaptive.cutoff(tails - 1) >= vocabulary) {
    fail(ExitCode::kConfig,
         "model.adaptive_softmax.cutoff.{}: {} leaves no ids for the last tail of a vocabulary of "
         "{}; choose a smaller cutoff, or leave it out",
         tails - 1, adaptive.cutoff(tails - 1), vocabulary);
  }
  std::vector<VocabularyPart> parts;
  std::int64_t begin = 0, width = embedding_width(config);
  for (int i = 0; i <= tails; ++i) {
    const std::int64_t end = i < tails ? adaptive.cutoff(i) : vocabulary;
    parts.push_back({.ids = {begin, end}, .width = width});
    begin = end;
    width /= adaptive.divisor();
  }
  return parts;
}

std::vector<VocabularyPart> embedding_parts(const configs::Model& config, std::int64_t vocabulary) {
  if (config.adaptive_softmax().inputs()) return vocabulary_parts(config, vocabulary);
  return {{.ids = {0, vocabulary}, .width = embedding_width(config)}};
}

std::string tail_name(std::size_t number) {
  return number == 0 ? "" : ".tails." + std::to_string(number - 1);
}

double zipf_share(const Interval& ids, std::int64_t vocabulary) {
  // The integral of 1 / x, in place of the sum.
  const auto up_to = [](std::int64_t id) { return std::log(static_cast<double>(id) + 0.5); };
  return (up_to(ids.end) - up_to(ids.begin)) / (up_to(vocabulary) - up_to(0));
}

at::Tensor zipf_ids(const at::Tensor& uniform, std::int64_t vocabulary) {
  // zipf_share({0, x}) solved for x.
  return at::pow(2.0 * static_cast<double>(vocabulary) + 1, uniform.to(at::kDouble))
      .mul(0.5)
      .sub(0.5)
      .to(at::kLong);
}

}  // namespace birkhoff
