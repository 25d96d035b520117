#include "attention/sort_net.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "cluster/base/error.h"
#include "configs/attention.pb.h"

namespace birkhoff {
namespace {

using configs::SinkhornAttention;

at::Tensor widened(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? x : x.to(at::kFloat);
}

// x of padding is never read, not even as 0 * NaN: the one pass below leaves it out, and so does
// the first token.

// Sums of x over the tokens of each block where `mask` [B, N, b] is true (undefined: everywhere).
at::Tensor block_sums(const at::Tensor& x_BNbC, const at::Tensor& mask_BNb) {
  if (!mask_BNb.defined()) return x_BNbC.sum(2);
  return x_BNbC.masked_fill(mask_BNb.logical_not().unsqueeze(3), 0).sum(2);
}

// Tokens that block_sums adds up, as [B, N, 1] of x's dtype.
at::Tensor block_counts(const at::Tensor& x_BNbC, const at::Tensor& mask_BNb) {
  if (!mask_BNb.defined()) return at::full({1, 1, 1}, x_BNbC.size(2), x_BNbC.options());
  return mask_BNb.sum(2, /*keepdim=*/true).to(x_BNbC.scalar_type());
}

// x of each block's first token, 0 where that is padding.
at::Tensor first_tokens(const Blocks& blocks, const at::Tensor& x_BNbC) {
  const at::Tensor first_BNC = x_BNbC.select(2, 0);
  if (!blocks.valid_BNb().defined()) return first_BNC;
  return first_BNC.masked_fill(blocks.valid_BNb().select(2, 0).logical_not().unsqueeze(2), 0);
}

at::Tensor both(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined()) return b;
  return b.defined() ? at::logical_and(a, b) : a;
}

// Tokens of each block that are valid and of the same document as the block's token `anchor`.
at::Tensor with_document_of(const Blocks& blocks, std::int64_t anchor) {
  const at::Tensor& segments_BNb = blocks.segments_BNb();
  if (!segments_BNb.defined()) return blocks.valid_BNb();
  return both(blocks.valid_BNb(), segments_BNb == segments_BNb.select(2, anchor).unsqueeze(2));
}

// Sums (and counts) over all tokens of the document up to each block's first token: earlier blocks
// contribute what they hold of that document, which is their last token's.
std::pair<at::Tensor, at::Tensor> sums_to_first_token(const Blocks& blocks,
                                                      const at::Tensor& x_BNbC) {
  const std::int64_t N = blocks.num_blocks(), b = x_BNbC.size(2);
  at::Tensor earlier_BNN = at::ones({1, N, N}, blocks.mask_options()).tril(-1);
  if (blocks.segments_BNb().defined()) {
    const at::Tensor first_BN = blocks.segments_BNb().select(2, 0);
    const at::Tensor last_BN = blocks.segments_BNb().select(2, b - 1);
    earlier_BNN = at::logical_and(earlier_BNN, first_BN.unsqueeze(2) == last_BN.unsqueeze(1));
  }
  const at::Tensor mask_BNb = with_document_of(blocks, b - 1);
  const at::Tensor weights_BNN = earlier_BNN.to(x_BNbC.scalar_type());
  const at::Tensor sums_BNC =
      at::matmul(weights_BNN, block_sums(x_BNbC, mask_BNb)) + first_tokens(blocks, x_BNbC);
  const at::Tensor counts_BN1 =
      at::matmul(weights_BNN, block_counts(x_BNbC, mask_BNb).expand({-1, N, 1})) + 1;
  return {sums_BNC, counts_BN1};
}

// x [B, N, C] times each head's weight [H, C, K], plus bias [H, K] if defined: [B, H, N, K].
at::Tensor per_head(const at::Tensor& x_BNC, const at::Tensor& weight_HCK,
                    const at::Tensor& bias_HK) {
  const std::int64_t heads = weight_HCK.size(0);
  const at::Tensor weight_CF = weight_HCK.transpose(0, 1).flatten(1).to(x_BNC.scalar_type());
  const at::Tensor y_BHNK = at::matmul(x_BNC, weight_CF).unflatten(2, {heads, -1}).transpose(1, 2);
  return bias_HK.defined() ? y_BHNK + bias_HK.to(x_BNC.scalar_type()).unsqueeze(1) : y_BHNK;
}

}  // namespace

at::Tensor pool_destinations(const SinkhornAttention& config, bool causal, const Blocks& blocks,
                             const at::Tensor& x_BLC) {
  if (config.pooling() == SinkhornAttention::first) {
    return widened(first_tokens(blocks, blocks.fold(x_BLC, 1)));
  }
  const at::Tensor x_BNbC = widened(blocks.fold(x_BLC, 1));
  switch (config.pooling()) {
    case SinkhornAttention::first:
      break;
    case SinkhornAttention::sum:
      if (causal) return sums_to_first_token(blocks, x_BNbC).first;
      return block_sums(x_BNbC, with_document_of(blocks, 0));
    case SinkhornAttention::mean:
      if (!causal) {
        const at::Tensor mask_BNb = with_document_of(blocks, 0);
        return block_sums(x_BNbC, mask_BNb) / block_counts(x_BNbC, mask_BNb).clamp_min(1);
      }
      [[fallthrough]];
    case SinkhornAttention::cumulative_mean: {
      const auto [sums_BNC, counts_BN1] = sums_to_first_token(blocks, x_BNbC);
      return sums_BNC / counts_BN1;
    }
  }
  require(false, "unknown pooling");
  return {};
}

at::Tensor pool_sources(const Blocks& blocks, const at::Tensor& x_BLC) {
  const at::Tensor x_BNbC = widened(blocks.fold(x_BLC, 1));
  const at::Tensor& mask_BNb = blocks.valid_BNb();
  return block_sums(x_BNbC, mask_BNb) / block_counts(x_BNbC, mask_BNb).clamp_min(1);
}

SortNet::SortNet(const SinkhornAttention& config, const MechanismShape& shape,
                 const std::string& prefix, Parameters& parameters)
    : heads_(shape.heads),
      max_blocks_(config.max_blocks()),
      temperature_(config.temperature()),
      gumbel_noise_(config.gumbel_noise()) {
  const std::int64_t H = shape.heads, C = shape.channels, b = config.block();
  const std::int64_t needed = (shape.sequence_length + b - 1) / b;
  if (max_blocks_ == 0) max_blocks_ = needed;
  const Init fan_in = Init::normal(1 / std::sqrt(static_cast<double>(C)));
  if (config.sort_net() == SinkhornAttention::attention) {
    query_HCD_ = parameters.add(prefix + ".query.weight", {H, C, shape.head_dim}, fan_in, true);
    key_HCD_ = parameters.add(prefix + ".key.weight", {H, C, shape.head_dim}, fan_in, true);
    return;
  }
  if (max_blocks_ < needed) {
    fail(ExitCode::kConfig,
         "sinkhorn.max_blocks is {}, but {} tokens in blocks of {} are {} blocks (in {}); raise it "
         "or leave it 0",
         max_blocks_, shape.sequence_length, b, needed, prefix);
  }
  final_relu_ = config.sort_net() == SinkhornAttention::relu_mlp_relu ||
                config.sort_net() == SinkhornAttention::linear_relu;
  if (config.sort_net() == SinkhornAttention::relu_mlp_relu ||
      config.sort_net() == SinkhornAttention::mlp) {
    hidden_HCC_ = parameters.add(prefix + ".hidden.weight", {H, C, C}, fan_in, true);
    hidden_bias_HC_ = parameters.add(prefix + ".hidden.bias", {H, C}, Init::zeros(), false);
  }
  // Small, so that training starts near the mean of all blocks; sums of b tokens are larger.
  const double scale = config.pooling() == SinkhornAttention::sum ? std::sqrt(b) : 1;
  output_HCM_ = parameters.add(prefix + ".output.weight", {H, C, max_blocks_},
                               Init::normal(0.02 / scale), true);
  output_bias_HM_ = parameters.add(prefix + ".output.bias", {H, max_blocks_}, Init::zeros(), false);
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
    const at::Tensor output_HCN = output_HCM_.narrow(2, 0, N);
    const at::Tensor bias_HN = output_bias_HM_.narrow(1, 0, N);
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
    // Rows one after another, each for all blocks that a sequence may have, and cut: an entry's
    // noise does not depend on how many there are.
    const std::int64_t M = std::max(N, max_blocks_);
    const at::Tensor noise_BNHM = philox_gumbel(*noise, NoisePurpose::kGumbel, {N, heads_, M});
    scores_BHNN = scores_BHNN + noise_BNHM.narrow(3, 0, N).transpose(1, 2);
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
