// Embeddings of square patches of images (Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words",
// section 3.1): x_n = W p_n (+ b) + position_n, where p_n are the standardized values of patch n,
// (value / 255 - mean) / std, in the order rows, columns, channels. Patches are numbered row by
// row. On request a learned vector, the class token, precedes them.
//
// Legend: B batch, T tokens, C channels of the model, I values of a patch, D channels of an image.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "data/batch/image_dims.h"
#include "models/embeddings/positions.h"
#include "models/embeddings/sequence_embedding.h"
#include "models/transformer/layers.h"

namespace birkhoff::configs {
class Config;
}

namespace birkhoff {

class PatchEmbedding final : public SequenceEmbedding {
 public:
  // config must be resolved, with task.image_classification, whose patches fit `image` and
  // data.sequence_length. `parameters` must outlive it.
  PatchEmbedding(const configs::Config& config, const ImageDims& image, Parameters& parameters);

  TokenSlices slices(const Batch& batch) const override;
  at::Tensor lengths(const Batch& batch) const override;
  // Of the images in field::kImages.
  at::Tensor operator()(const Batch& batch, const TokenSlices& tokens,
                        const std::optional<NoiseKey>& noise) const override;
  double flops() const override { return linear_.flops(); }

 private:
  // The standardized patches [B, T, I]; zeros for the class token.
  at::Tensor patches(const at::Tensor& images) const;

  const Parameters& parameters_;
  int unit_;
  std::int64_t num_tokens_, patch_;
  ImageDims image_;
  float dropout_, token_dropout_;
  at::Tensor mean_D, std_D;  // or [1], for all channels
  Linear linear_;
  at::Tensor class_token_C;  // undefined: there is none
  Positions positions_;
};

}  // namespace birkhoff
