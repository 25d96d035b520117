// Encodings of positions, which are added to embeddings.
//
// Legend: B batch, T tokens, C channels, N rows of a table.
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
class Model;
}

namespace birkhoff {

// Returns an fp64 table [T, C] of sinusoidal positions (Vaswani et al. 2017, section 3.5) in T2T's
// layout: column i < C/2 is sin(t / s_i) and column C/2 + i is cos(t / s_i), with wavelengths s_i
// geometric from 1 to 10,000. The last column of an odd C is 0.
at::Tensor sinusoid_table(std::int64_t positions, std::int64_t channels);

class Positions {
 public:
  // Encodings as model.positions says, for `length` tokens. image: only image_axes needs it;
  // position t is then value t of an image of this shape. prefix: the names of the parameters begin
  // with it.
  Positions(const configs::Model& model, std::int64_t length, const std::string& prefix,
            const std::optional<ImageDims>& image, Parameters& parameters);

  // Returns x_BTC plus the encodings of positions_BT. If positions_BT is undefined, the positions
  // of each sequence are 0, 1, 2, ... If `tokens` are divided over ranks, x_BTC holds this rank's
  // slice of the batch * num_tokens tokens.
  at::Tensor add_to(const at::Tensor& x_BTC, std::int64_t batch, std::int64_t num_tokens,
                    const at::Tensor& positions_BT, const TokenSlices& tokens) const;

 private:
  // The table of one axis. Position t has row floor(t / stride) mod N.
  struct Axis {
    at::Tensor table_NC;
    std::int64_t stride = 1;
  };

  // The encodings [..., C] of int64 positions [...].
  at::Tensor encodings(const at::Tensor& positions) const;

  std::vector<Axis> axes_;  // an encoding is the sum of a row of each; empty: no positions
};

}  // namespace birkhoff
