// The SortNet of Sparse Sinkhorn attention, and its inputs. Blocks are pooled, and a small network
// per head scores which source block each destination block should see. Legend: B batch, H heads, L
// tokens, N blocks, b tokens of a block, C channels, D head dim, M maximum number of blocks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

#include "attention/kernels/block_attention/block_attention.h"
#include "attention/mechanism.h"

namespace birkhoff::configs {
class SinkhornAttention;
}

namespace birkhoff {

// Returns destination features psi [B, N, C], in fp32 or wider, of x [B, L, C]. A feature reads
// only tokens of the document of its block's first token. Causal features read positions up to and
// including that first token (the paper's eq. 5, with its limit i b + 1 corrected to i b).
// Path::kFused sums in one pass (block_pool.h) where that fits, otherwise in LibTorch operations.
// first_BNC: of first_of_blocks(), for `pooling: first`; may be undefined.
at::Tensor pool_destinations(const configs::SinkhornAttention& config, bool causal,
                             const Blocks& blocks, const at::Tensor& x_BLC,
                             const at::Tensor& first_BNC, Path limit);

// Returns source features [B, N, C]: the mean over each block's valid tokens.
at::Tensor pool_sources(const Blocks& blocks, const at::Tensor& x_BLC, Path limit);

class SortNet {
 public:
  // Adds the network's parameters under `prefix`. Error(kConfig) if a sequence may have more blocks
  // than the network scores.
  SortNet(const configs::SinkhornAttention& config, const MechanismShape& shape,
          const std::string& prefix, Parameters& parameters);

  // Whether the network also reads source features (the variant `attention`).
  bool reads_sources() const { return key_HCD_.defined(); }

  // Returns (R + noise) / temperature [B, H, N, N], row = destination, column = source. source_BNC
  // may be undefined unless reads_sources(). Error(kConfig) for more than M blocks, unless
  // reads_sources(). For up to M blocks the noise of an entry does not depend on N.
  at::Tensor scores(const at::Tensor& psi_BNC, const at::Tensor& source_BNC,
                    const std::optional<NoiseKey>& noise) const;

  // Twice the multiply-adds of the forward pass for N blocks.
  double flops(std::int64_t num_blocks) const;

 private:
  std::int64_t heads_, max_blocks_;
  double temperature_;
  bool gumbel_noise_;
  bool final_relu_ = false;
  at::Tensor hidden_HCC_, hidden_bias_HC_;  // F1 of the two-layer variants
  at::Tensor output_HCM_, output_bias_HM_;  // the last affine map of variants 1 to 4
  at::Tensor query_HCD_, key_HCD_;          // of the variant `attention`
};

}  // namespace birkhoff
