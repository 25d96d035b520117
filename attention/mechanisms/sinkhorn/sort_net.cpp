#include "attention/mechanisms/sinkhorn/sort_net.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "attention/kernels/block_pool/block_pool.h"
#include "attention/kernels/common/masked_softmax.h"
#include "cluster/base/error.h"
#include "configs/schema/attention.pb.h"

namespace birkhoff {
namespace {

using Config = configs::SinkhornAttention;

at::ScalarType feature_type(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}
at::Tensor widened(const at::Tensor& x) { return x.to(feature_type(x)); }

// ---- The tokens to pool.

// The valid tokens of each block that are in the same document as the block's token `anchor`.
at::Tensor with_document_of(const Blocks& blocks, std::int64_t anchor) {
  const at::Tensor& segments_BNb = blocks.segments_BNb();
  if (!segments_BNb.defined()) return blocks.valid_BNb();
  return and_defined(blocks.valid_BNb(),
                     segments_BNb == segments_BNb.select(2, anchor).unsqueeze(2));
}

// The document of each block's token `anchor`.
at::Tensor document_of(const Blocks& blocks, std::int64_t anchor) {
  return blocks.segments_BNb().select(2, anchor);
}

// Pairs [B, N, N] (block, earlier block) where the last token of the earlier block is in the
// document of the block's first token.
at::Tensor earlier_blocks(const Blocks& blocks) {
  const std::int64_t N = blocks.num_blocks();
  const at::Tensor earlier_BNN = at::ones({1, N, N}, blocks.mask_options()).tril(-1);
  if (!blocks.segments_BNb().defined()) return earlier_BNN;
  return at::logical_and(earlier_BNN, document_of(blocks, 0).unsqueeze(2) ==
                                          document_of(blocks, blocks.block() - 1).unsqueeze(1));
}

// The number of tokens of each block where `mask` is true, [B, N, 1].
at::Tensor block_counts(const Blocks& blocks, const at::Tensor& mask_BNb, at::ScalarType dtype) {
  if (mask_BNb.defined()) return mask_BNb.sum(2, /*keepdim=*/true).to(dtype);
  return at::full({1, blocks.num_blocks(), 1}, blocks.block(), blocks.mask_options().dtype(dtype));
}

// Pools each block's own tokens where `mask` is true. `mean`: divides by their number.
BlockPooling own_tokens(const Blocks& blocks, const at::Tensor& mask_BNb, bool mean,
                        at::ScalarType dtype) {
  BlockPooling pooling{.block = blocks.block(), .mask_BNb = mask_BNb};
  if (mean) pooling.divisor_BN1 = block_counts(blocks, mask_BNb, dtype).clamp_min(1);
  return pooling;
}

// Pools all tokens of the document up to each block's first token. An earlier block contributes its
// tokens that are in the document of its last token.
BlockPooling tokens_to_first(const Blocks& blocks, bool mean, at::ScalarType dtype) {
  const std::int64_t b = blocks.block();
  BlockPooling pooling{.block = b, .mask_BNb = with_document_of(blocks, b - 1), .cumulative = true};
  if (mean) {
    const at::Tensor counts_BN1 = block_counts(blocks, pooling.mask_BNb, dtype);
    pooling.divisor_BN1 = at::matmul(earlier_blocks(blocks).to(dtype), counts_BN1) + 1;
  }
  if (!blocks.valid_BNb().defined() && !blocks.segments_BNb().defined()) return pooling;
  at::Tensor first_exists_BN, opens_BN, keeps_BN;
  first_exists_BN = opens_BN = keeps_BN = at::ones({1, blocks.num_blocks()}, blocks.mask_options());
  if (blocks.valid_BNb().defined()) first_exists_BN = blocks.valid_BNb().select(2, 0);
  if (blocks.segments_BNb().defined()) {
    // A document does not come back, so the sums so far belong to the document of the last token
    // before the block.
    const at::Tensor last_BN = document_of(blocks, b - 1);
    const at::Tensor before_BN = shift_blocks(last_BN, 1, -1, -1);
    opens_BN = document_of(blocks, 0) == before_BN;
    keeps_BN = last_BN == before_BN;
  }
  pooling.links_BN = first_exists_BN.to(at::kByte) * kFirstExists +
                     opens_BN.to(at::kByte) * kOpens + keeps_BN.to(at::kByte) * kKeeps;
  return pooling;
}

// ---- The same in LibTorch operations. x of padding is never used, not even as 0 * NaN.

// Features of each block's first token, 0 if that is padding.
at::Tensor without_padding(const Blocks& blocks, const at::Tensor& first_BNC) {
  if (!blocks.valid_BNb().defined()) return first_BNC;
  return first_BNC.masked_fill(blocks.valid_BNb().select(2, 0).logical_not().unsqueeze(2), 0);
}

at::Tensor pool_by_operations(const Blocks& blocks, const at::Tensor& x_BLC,
                              const BlockPooling& pooling) {
  const at::Tensor x_BNbC = widened(blocks.to_blocks(x_BLC, 1));
  at::Tensor masked_BNbC = x_BNbC;
  if (pooling.mask_BNb.defined()) {
    masked_BNbC = x_BNbC.masked_fill(pooling.mask_BNb.logical_not().unsqueeze(3), 0);
  }
  at::Tensor sums_BNC = masked_BNbC.sum(2);
  if (pooling.cumulative) {
    const at::Tensor weights_BNN = earlier_blocks(blocks).to(sums_BNC.scalar_type());
    sums_BNC = at::matmul(weights_BNN, sums_BNC) + without_padding(blocks, x_BNbC.select(2, 0));
  }
  return pooling.divisor_BN1.defined() ? sums_BNC / pooling.divisor_BN1 : sums_BNC;
}

at::Tensor pool(const Blocks& blocks, const at::Tensor& x_BLC, const BlockPooling& pooling,
                Path limit) {
  if (take_path("pooling of blocks", choose_path(x_BLC, limit)) == Path::kFused) {
    return pool_blocks(x_BLC, pooling);
  }
  return pool_by_operations(blocks, x_BLC, pooling);
}

// x [B, N, C] times each head's weight [H, C, K], plus bias [H, K] if defined: [B, H, N, K].
at::Tensor per_head(const at::Tensor& x_BNC, const at::Tensor& weight_HCK,
                    const at::Tensor& bias_HK) {
  const std::int64_t heads = weight_HCK.size(0);
  const at::Tensor weight_CF = weight_HCK.transpose(0, 1).flatten(1).to(x_BNC.scalar_type());
  const at::Tensor x_MC = x_BNC.flatten(0, 1);
  const at::Tensor y_MF =
      bias_HK.defined() ? at::addmm(bias_HK.flatten().to(x_BNC.scalar_type()), x_MC, weight_CF)
                        : at::mm(x_MC, weight_CF);
  return y_MF.view({x_BNC.size(0), x_BNC.size(1), heads, -1}).transpose(1, 2);
}

}  // namespace

at::Tensor pool_destinations(const Config& config, bool causal, const Blocks& blocks,
                             const at::Tensor& x_BLC, const at::Tensor& first_BNC, Path limit) {
  if (config.pooling() == Config::first) {
    return without_padding(
        blocks, first_BNC.defined() ? first_BNC : widened(blocks.to_blocks(x_BLC, 1).select(2, 0)));
  }
  const bool mean = config.pooling() != Config::sum;
  if (causal || config.pooling() == Config::cumulative_mean) {
    return pool(blocks, x_BLC, tokens_to_first(blocks, mean, feature_type(x_BLC)), limit);
  }
  return pool(blocks, x_BLC,
              own_tokens(blocks, with_document_of(blocks, 0), mean, feature_type(x_BLC)), limit);
}

at::Tensor pool_sources(const Blocks& blocks, const at::Tensor& x_BLC, Path limit) {
  const BlockPooling pooling = own_tokens(blocks, blocks.valid_BNb(),
                                          /*mean=*/true, feature_type(x_BLC));
  return pool(blocks, x_BLC, pooling, limit);
}

SortNet::SortNet(const Config& config, const MechanismShape& shape, const std::string& prefix,
                 Parameters& parameters)
    : heads_(shape.heads),
      max_blocks_(config.max_blocks()),
      temperature_(config.temperature()),
      gumbel_noise_(config.gumbel_noise()) {
  const std::int64_t H = shape.heads, C = shape.channels, b = config.block();
  const std::int64_t needed = (shape.sequence_length + b - 1) / b;
  if (max_blocks_ == 0) max_blocks_ = needed;
  const Initializer fan_in = Initializer::normal(1 / std::sqrt(static_cast<double>(C)));
  if (config.sort_net() == Config::attention) {
    query_HCD_ =
        parameters.add_of_heads(prefix + ".query.weight", {H, C, shape.head_dim}, fan_in, true);
    key_HCD_ =
        parameters.add_of_heads(prefix + ".key.weight", {H, C, shape.head_dim}, fan_in, true);
    return;
  }
  if (max_blocks_ < needed) {
    fail(ExitCode::kConfig,
         "sinkhorn.max_blocks is {}, but {} tokens in blocks of {} are {} blocks (in {}); raise it "
         "or leave it 0",
         max_blocks_, shape.sequence_length, b, needed, prefix);
  }
  final_relu_ =
      config.sort_net() == Config::relu_mlp_relu || config.sort_net() == Config::linear_relu;
  if (config.sort_net() == Config::relu_mlp_relu || config.sort_net() == Config::mlp) {
    hidden_HCC_ = parameters.add_of_heads(prefix + ".hidden.weight", {H, C, C}, fan_in, true);
    hidden_bias_HC_ =
        parameters.add_of_heads(prefix + ".hidden.bias", {H, C}, Initializer::zeros(), false);
  }
  // Small, so training starts near the mean of all blocks. Sums of b tokens are larger, so they get
  // smaller weights.
  const double scale = config.pooling() == Config::sum ? std::sqrt(b) : 1;
  output_HCM_ = parameters.add_of_heads(prefix + ".output.weight", {H, C, max_blocks_},
                                        Initializer::normal(0.02 / scale), true);
  output_bias_HM_ = parameters.add_of_heads(prefix + ".output.bias", {H, max_blocks_},
                                            Initializer::zeros(), false);
}

at::Tensor SortNet::scores(const at::Tensor& psi_BNC, const at::Tensor& source_BNC,
                           const std::optional<NoiseKey>& noise) const {
  const std::int64_t N = psi_BNC.size(1);
  if (!reads_sources() && N > max_blocks_) {
    fail(ExitCode::kConfig,
         "a sequence of {} blocks is longer than the {} that this model's SortNet scores; shorten "
         "it, or train with a larger sinkhorn.max_blocks or with sort_net: attention",
         N, max_blocks_);
  }
  at::Tensor scores_BHNN;
  if (reads_sources()) {
    const at::Tensor q_BHND = per_head(psi_BNC, query_HCD_, {});
    const at::Tensor k_BHND = per_head(source_BNC, key_HCD_, {});
    scores_BHNN = at::matmul(q_BHND, k_BHND.transpose(-1, -2)) *
                  (1 / std::sqrt(static_cast<double>(query_HCD_.size(2))));
  } else {
    // The gradient of a slice would be a copy into zeros.
    const bool whole = N == max_blocks_;
    const at::Tensor output_HCN = whole ? output_HCM_ : output_HCM_.narrow(2, 0, N);
    const at::Tensor bias_HN = whole ? output_bias_HM_ : output_bias_HM_.narrow(1, 0, N);
    if (hidden_HCC_.defined()) {
      const at::Tensor hidden_BHNC = at::relu(per_head(psi_BNC, hidden_HCC_, hidden_bias_HC_));
      const auto dtype = psi_BNC.scalar_type();
      scores_BHNN = at::matmul(hidden_BHNC, output_HCN.to(dtype)) + bias_HN.to(dtype).unsqueeze(1);
    } else {
      scores_BHNN = per_head(psi_BNC, output_HCN, bias_HN);
    }
    if (final_relu_) scores_BHNN = at::relu(scores_BHNN);
  }
  if (gumbel_noise_ && noise) {
    // Rows are drawn one after another, each for all blocks that a sequence may have, and then cut:
    // the noise of an entry does not depend on the number of blocks.
    const std::int64_t M = std::max(N, max_blocks_);
    const at::Tensor noise_BNHM =
        philox_gumbel(*noise, NoisePurpose::kGumbel, {N, noise->heads_of_layer(heads_), M});
    scores_BHNN = scores_BHNN +
                  noise_BNHM.narrow(2, noise->first_head, heads_).narrow(3, 0, N).transpose(1, 2);
  }
  return scores_BHNN / temperature_;
}

double SortNet::flops(std::int64_t num_blocks) const {
  const double N = static_cast<double>(num_blocks);
  double multiply_adds = 0;
  if (reads_sources()) {
    multiply_adds = 2 * N * static_cast<double>(query_HCD_.numel()) +
                    N * N * static_cast<double>(heads_ * query_HCD_.size(2));
  } else {
    multiply_adds = N * N * static_cast<double>(heads_ * output_HCM_.size(1));
    if (hidden_HCC_.defined()) multiply_adds += N * static_cast<double>(hidden_HCC_.numel());
  }
  return 2 * multiply_adds;
}

}  // namespace birkhoff
