// Legend: see padded_segments.h.
#include <ATen/ATen.h>
#include <ATen/OpMathType.h>

#include "attention/kernels/common/masked_softmax.h"
#include "attention/kernels/gathered_attention/padded_segments.h"
#include "attention/kernels/gathered_attention/paths.h"

namespace birkhoff {

AttentionPart attend_gathered_sdpa(const GatheredAttention& given) {
  const GatheredAttention in = with_keys_of_queries(given);
  const std::int64_t B = in.q_BHLD.size(0), H = in.q_BHLD.size(1);
  const at::ScalarType dtype = in.q_BHLD.scalar_type();
  const PaddedSegments queries(in.rows.queries, B, H), keys(in.rows.keys, B, H);
  const auto one_head = [](const at::Tensor& x) { return x.flatten(0, 2).unsqueeze(1); };
  const at::Tensor visible_BHGMN = visible_pairs(in, queries, keys);
  const at::Tensor out_BHPD =
      library_attention(one_head(queries.gather(in.q_BHLD)), one_head(keys.gather(in.k_BHSD)),
                        one_head(keys.gather(in.v_BHSD)),
                        one_head(additive_mask(visible_BHGMN, dtype)))
          .view({B, H, -1, in.q_BHLD.size(3)});
  const at::Tensor sees_BHP = visible_BHGMN.any(4).flatten(2);
  return mean_of_slots(
      queries,
      out_BHPD.masked_fill(sees_BHP.unsqueeze(3).logical_not(), 0).to(at::toOpMathType(dtype)),
      sees_BHP, in.q_BHLD);
}

}  // namespace birkhoff
