// A language model of the values of images: value t in raster order (rows, columns, channels) is
// predicted from the values before it, the first one from nothing. An image is one sequence:
//
//   inputs  begin, v_0, ..., v_T-2      targets  v_0, v_1, ..., v_T-1
//
// so no value of another image is ever seen.
//
// Legend: B batch, T values of an image.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "models/language_model.h"

namespace birkhoff {

class PixelModel final : public Model {
 public:
  // The values of a u8.
  static constexpr std::int64_t kVocabulary = 256;

  // config must be resolved, with data.sequence_length = image.values(). Errors as of
  // LanguageModel.
  PixelModel(const configs::Config& config, const ImageDims& image, const ModelPlacement& place)
      : model_(config, kVocabulary, place, image) {}

  // The batch of the language model for images [B, rows, columns, channels] (field::kImages).
  static Batch tokens_of(const Batch& batch);

  Parameters& parameters() override { return model_.parameters(); }
  LossSums loss_sums(const Batch& batch, const std::optional<NoiseKey>& noise) override {
    return model_.loss_sums(tokens_of(batch), noise);
  }
  // Decodes from kBeginToken on.
  Decoder* decoder() override { return &model_; }
  double forward_flops_per_sequence() const override { return model_.forward_flops_per_sequence(); }
  std::vector<Figure> figures() const override { return model_.figures(); }
  std::vector<std::string> warnings() const override { return model_.warnings(); }
  LanguageModel& language_model() { return model_; }

 private:
  LanguageModel model_;
};

}  // namespace birkhoff
