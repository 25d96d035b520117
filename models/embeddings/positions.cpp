#include "models/embeddings/positions.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>

#include "cluster/base/error.h"
#include "configs/schema/config.pb.h"
#include "models/transformer/layers.h"

namespace birkhoff {

at::Tensor sinusoid_table(std::int64_t positions, std::int64_t channels) {
  at::Tensor table_TC = at::zeros({positions, channels}, at::kDouble);
  auto table = table_TC.accessor<double, 2>();
  const std::int64_t half = channels / 2;
  const double step = std::log(1e4) / static_cast<double>(std::max<std::int64_t>(half - 1, 1));
  for (std::int64_t t = 0; t < positions; ++t) {
    for (std::int64_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(t) * std::exp(-step * static_cast<double>(i));
      table[t][i] = std::sin(angle);
      table[t][half + i] = std::cos(angle);
    }
  }
  return table_TC;
}

Positions::Positions(const configs::Model& model, std::int64_t length, const std::string& prefix,
                     const std::optional<ImageDims>& image, Parameters& parameters) {
  const std::int64_t channels = model.channels();
  const auto learned = [&](const std::string& name, std::int64_t rows) {
    return parameters.add(prefix + "positions." + name, {rows, channels},
                          weight_init(model, WeightRole::kEmbedding, channels), /*decay=*/true);
  };
  switch (model.positions()) {
    case configs::Model::learned:
      axes_ = {{learned("weight", length), 1}};
      break;
    case configs::Model::sinusoidal:
      axes_ = {{sinusoid_table(length, channels)
                    .to(at::TensorOptions(parameters.dtype()).device(parameters.device())),
                1}};
      break;
    case configs::Model::no_positions:
    case configs::Model::relative_sinusoidal:  // of attention
      break;
    case configs::Model::image_axes:
      require(image.has_value(), "positions on the axes of an image are of its values");
      axes_ = {{learned("rows.weight", image->rows), image->columns * image->channels},
               {learned("columns.weight", image->columns), image->channels},
               {learned("channels.weight", image->channels), 1}};
      break;
  }
}

at::Tensor Positions::encodings(const at::Tensor& positions) const {
  at::Tensor sum;
  for (const Axis& axis : axes_) {
    const at::Tensor row =
        axes_.size() == 1 ? positions
                          : positions.div(axis.stride, "floor").remainder(axis.table_NC.size(0));
    const at::Tensor x = at::embedding(axis.table_NC, row);
    sum = sum.defined() ? sum + x : x;
  }
  return sum;
}

at::Tensor Positions::add_to(const at::Tensor& x_BTC, std::int64_t batch, std::int64_t num_tokens,
                             const at::Tensor& positions_BT, const TokenSlices& tokens) const {
  if (axes_.empty()) return x_BTC;
  if (positions_BT.defined()) return x_BTC + encodings(tokens.mine(positions_BT));
  const at::Tensor positions_TC =
      axes_.size() == 1 ? axes_[0].table_NC.narrow(0, 0, num_tokens)
                        : encodings(at::arange(num_tokens, x_BTC.options().dtype(at::kLong)));
  if (!tokens.divided()) return x_BTC + positions_TC;
  return x_BTC + tokens.mine(positions_TC.unsqueeze(0).expand({batch, -1, -1}));
}

}  // namespace birkhoff
