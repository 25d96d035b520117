// Encodings of positions, which are added to embeddings.
//
// Legend: B batch, T tokens, C channels.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cluster/base/tensors/parameters.h"
#include "data/batch/image_dims.h"
#include "models/parallel/token_slices.h"

namespace birkhoff::configs {
class Config;
}

namespace birkhoff {

// Returns an fp64 table [T, C] of sinusoidal positions (Vaswani et al. 2017, section 3.5) in T2T's
// layout: column i < C/2 is sin(t / s_i) and column C/2 + i is cos(t / s_i), with wavelengths s_i
// geometric from 1 to 10,000. The last column of an odd C is 0.
at::Tensor sinusoid_table(std::int64_t positions, std::int64_t channels);

class Positions {
 public:
  // model.positions of data.sequence_length tokens. With image_axes, position t is value t of an
  // image of shape `image`. `prefix` begins the parameters' names.
  Positions(const configs::Config& config, const std::string& prefix,
            const std::optional<ImageDims>& image, Parameters& parameters);

  // x [B, T, C] of the tokens, or a slice, plus the encodings of positions_BT; undefined: 0, 1, 2,
  // ...
  at::Tensor add_to(const at::Tensor& x_BTC, std::int64_t batch, std::int64_t num_tokens,
                    const at::Tensor& positions_BT, const TokenSlices& tokens) const;

 private:
  // A table of one axis: position t is its row t / stride modulo the number of rows.
  struct Axis {
    at::Tensor table_NC;
    std::int64_t stride = 1;
  };

  // Of any int64 positions [...]: [..., C].
  at::Tensor encodings(const at::Tensor& positions) const;

  std::vector<Axis> axes_;  // whose rows are added; no positions: none
};

}  // namespace birkhoff
