#include "models/embeddings/patch_embedding.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>

#include <vector>

#include "cluster/base/error.h"
#include "configs/schema/config.pb.h"
#include "models/parallel/parameter_use.h"

namespace birkhoff {
namespace {

// The values of a repeated field in the dtype and on the device of the parameters.
at::Tensor constants(const google::protobuf::RepeatedField<float>& values, double fallback,
                     const Parameters& parameters) {
  std::vector<double> all(values.begin(), values.end());
  if (all.empty()) all.push_back(fallback);
  return at::tensor(all, at::kDouble)
      .to(at::TensorOptions(parameters.dtype()).device(parameters.device()));
}

}  // namespace

PatchEmbedding::PatchEmbedding(const configs::Config& config, const ImageDims& image,
                               Parameters& parameters)
    : parameters_(parameters),
      unit_(parameters.begin_unit()),
      num_tokens_(config.data().sequence_length()),
      patch_(config.task().image_classification().patch()),
      image_(image),
      dropout_(config.model().dropout().embedding()),
      token_dropout_(config.model().dropout().token()),
      mean_D(constants(config.task().image_classification().pixel_mean(), 0, parameters)),
      std_D(constants(config.task().image_classification().pixel_std(), 1, parameters)),
      linear_(config.model(), WeightRole::kInner, patch_ * patch_ * image.channels,
              config.model().channels(), "embedding", parameters),
      class_token_C(config.task().image_classification().pooling() ==
                            configs::ImageClassification::class_token
                        ? parameters.add("embedding.class_token", {config.model().channels()},
                                         weight_init(config.model(), WeightRole::kEmbedding,
                                                     config.model().channels()),
                                         /*decay=*/false)
                        : at::Tensor()),
      positions_(config.model(), config.data().sequence_length(), /*prefix=*/"",
                 /*image=*/std::nullopt, parameters) {
  const std::int64_t patches = (image.rows / patch_) * (image.columns / patch_);
  require(image.rows % patch_ == 0 && image.columns % patch_ == 0 &&
              patches + class_token_C.defined() == num_tokens_,
          "patches fit the image and the sequence");
}

TokenSlices PatchEmbedding::slices(const Batch& batch) const {
  return TokenSlices(parameters_.place(), batch.at(field::kImages).size(0), num_tokens_);
}

at::Tensor PatchEmbedding::lengths(const Batch& batch) const {
  const at::Tensor& images = batch.at(field::kImages);
  return at::full({images.size(0)}, num_tokens_, images.options().dtype(at::kLong));
}

at::Tensor PatchEmbedding::patches(const at::Tensor& images) const {
  const at::Tensor values =
      (images.to(parameters_.dtype()).div(255).sub(mean_D)).div(std_D);  // [B, rows, columns, D]
  const at::Tensor patches_BTI = values.unflatten(2, {-1, patch_})
                                     .unflatten(1, {-1, patch_})  // [B, n, patch, m, patch, D]
                                     .transpose(2, 3)
                                     .flatten(3)
                                     .flatten(1, 2);
  if (!class_token_C.defined()) return patches_BTI;
  return at::constant_pad_nd(patches_BTI, {0, 0, 1, 0});
}

at::Tensor PatchEmbedding::operator()(const Batch& batch, const TokenSlices& tokens,
                                      const std::optional<NoiseKey>& noise) const {
  const at::Tensor& images = batch.at(field::kImages);
  const std::int64_t size = images.size(0);
  if (const ImageDims read{images.size(1), images.size(2), images.size(3)}; read != image_) {
    fail(ExitCode::kData, "an image of {} values is not of the model's {}", read.text(),
         image_.text());
  }
  const ParameterUse use(parameters_, {unit_});
  at::Tensor x_BTC = linear_(tokens.mine(patches(images))).to(parameters_.dtype());
  if (class_token_C.defined()) {
    const at::Tensor is_class_BT =
        at::arange(num_tokens_, images.options().dtype(at::kLong)).eq(0).expand({size, -1});
    x_BTC = at::where(tokens.mine(is_class_BT).unsqueeze(-1), class_token_C, x_BTC);
  }
  if (noise) x_BTC = tokens.drop_tokens(x_BTC, token_dropout_, *noise);
  x_BTC = use.output(positions_.add_to(x_BTC, size, num_tokens_, /*positions_BT=*/{}, tokens));
  if (!noise) return x_BTC;
  return tokens.drop(x_BTC, dropout_, *noise, NoisePurpose::kEmbeddingDropout);
}

}  // namespace birkhoff
