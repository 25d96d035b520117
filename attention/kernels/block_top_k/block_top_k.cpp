#include "attention/kernels/block_top_k/block_top_k.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <limits>

#include "attention/kernels/block_top_k/cpu_top_k.h"
#include "attention/kernels/block_top_k/gpu_arguments.h"
#include "attention/kernels/clusters/cluster_lists.h"
#include "attention/kernels/counting_sort/counting_sort.h"
#include "cluster/base/error.h"
#include "cluster/base/gpu/device.h"

namespace birkhoff {
namespace {

void check(const BlockTopK& choice) {
  const at::Tensor &q = choice.q_BHLD, &k = choice.k_BHLD;
  require(q.dim() == 4 && q.sizes() == k.sizes() && q.scalar_type() == k.scalar_type() &&
              q.device() == k.device() && q.numel() > 0,
          "block choice: q and k must be [B, H, L, D], not empty");
  require(choice.block > 0 && choice.others >= 0, "block choice: block and others");
}

at::Tensor choose_reference(const BlockTopK& choice, const WholeBlocks& blocks) {
  const at::Tensor &mean_BHND = blocks.mean_BHND, &document_BN = blocks.document_BN;
  const std::int64_t N = mean_BHND.size(2), C = std::min(choice.others, N);
  const at::Tensor scores_BHLN =
      at::matmul(choice.q_BHLD.detach().to(mean_BHND.scalar_type()), mean_BHND.transpose(2, 3));
  const at::TensorOptions numbers = choice.documents.number_BL.options().dtype(at::kLong);
  const at::Tensor block_N = at::arange(N, numbers);
  const at::Tensor own_L1 =
      at::div(at::arange(choice.q_BHLD.size(2), numbers), choice.block, "floor").unsqueeze(1);
  const at::Tensor in_order_LN = choice.causal ? block_N < own_L1 : block_N != own_L1;
  const at::Tensor number_BL1 = choice.documents.number_BL.unsqueeze(2);
  const at::Tensor open_BLN = at::logical_and(
      at::logical_and(in_order_LN, number_BL1 == document_BN.unsqueeze(1)), number_BL1 >= 0);
  const at::Tensor hidden_B1LN = open_BLN.logical_not().unsqueeze(1);
  const at::Tensor order_BHLC = largest_first(
      scores_BHLN.masked_fill(hidden_B1LN, -std::numeric_limits<double>::infinity()), C);
  return order_BHLC.masked_fill(hidden_B1LN.expand_as(scores_BHLN).gather(3, order_BHLC), -1)
      .to(at::kInt);
}

}  // namespace

WholeBlocks::WholeBlocks(const BlockTopK& choice) {
  const std::int64_t N = choice.k_BHLD.size(2) / choice.block;
  mean_BHND = choice.k_BHLD.detach()
                  .narrow(2, 0, N * choice.block)
                  .unflatten(2, {N, choice.block})
                  .mean(3, /*keepdim=*/false, at::toOpMathType(choice.k_BHLD.scalar_type()));
  const at::Tensor number_BNb =
      choice.documents.number_BL.narrow(1, 0, N * choice.block).unflatten(1, {N, choice.block});
  const at::Tensor first_BN = number_BNb.select(2, 0);
  document_BN = first_BN.masked_fill((number_BNb != first_BN.unsqueeze(2)).any(2), -1);
}

PathChoice choose_path(const BlockTopK& choice, Path limit) {
  if (limit != Path::kFused) return {};
  const at::Tensor& q = choice.q_BHLD;
  return fused_unless(why_not_fused(
      q, [&] { return why_not_tiles(q.scalar_type(), q.size(3)); },
      [&] { return why_not_gpu_kernels(choice); }));
}

at::Tensor select_top_blocks(const BlockTopK& choice, Path limit) {
  check(choice);
  const WholeBlocks blocks(choice);
  if (take_path("choice of blocks", choose_path(choice, limit)) == Path::kReference) {
    return choose_reference(choice, blocks);
  }
  if (choice.q_BHLD.is_cpu()) return choose_on_cpu(choice, blocks);
  const GpuChoice gpu = gpu_top_k(choice, blocks);
  if constexpr (kHasGpuKernels) launch_block_choice(gpu.params, current_stream(choice.q_BHLD));
  return gpu.chosen_BHLC;
}

at::Tensor largest_first(const at::Tensor& scores, std::int64_t count) {
  const at::Tensor numbers =
      scores.masked_fill(scores.ne(scores), std::numeric_limits<double>::infinity());
  return std::get<1>(at::sort(numbers, std::optional<bool>(true), /*dim=*/-1, /*descending=*/true))
      .narrow(-1, 0, count);
}

GatheredRows lists_of_blocks(const BlockTopK& choice, const at::Tensor& chosen_BHLC) {
  const std::int64_t B = chosen_BHLC.size(0), H = chosen_BHLC.size(1), L = chosen_BHLC.size(2),
                     all = (L + choice.block - 1) / choice.block;
  const at::TensorOptions numbers = chosen_BHLC.options().dtype(at::kInt);
  const at::Tensor row_L = at::arange(L, numbers);
  // A query's segments: its own block, and the blocks that it chose. Padding has none.
  const at::Tensor segment_BHLC = at::empty({B, H, L, chosen_BHLC.size(3) + 1}, numbers);
  segment_BHLC.select(3, 0).copy_(at::div(row_L, choice.block, "floor"));
  segment_BHLC.narrow(3, 1, chosen_BHLC.size(3)).copy_(chosen_BHLC);
  if (choice.documents.has_padding) {
    segment_BHLC.masked_fill_((choice.documents.number_BL < 0).unsqueeze(1).unsqueeze(3), -1);
  }
  const SortedIndices groups = counting_sort(segment_BHLC.flatten(2), all);
  const at::Tensor queries_BHP = at::div(groups.order_BHP, segment_BHLC.size(3), "floor");
  // A causal query is in segments of its own and earlier blocks only.
  const at::Tensor k_ends_G = at::arange(1, all + 1, numbers.dtype(at::kLong))
                                  .mul_(choice.block)
                                  .clamp_max_(L)
                                  .to(at::kInt);
  GatheredRows rows{make_row_lists(queries_BHP, groups.starts_BHR.narrow(2, 1, all), L),
                    make_permuted_lists(row_L.view({1, 1, -1}), k_ends_G.view({1, 1, -1}),
                                        row_L.view({1, 1, -1}), /*whole=*/true),
                    {}};
  if (choice.causal) rows.band.least = 0;
  hide_other_documents(choice.documents, rows.band);
  return rows;
}

}  // namespace birkhoff
