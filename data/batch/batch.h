// A batch: named fields, as the corpus manifest declares them, plus which samples they are.
//
// Legend: B batch, T tokens of a sequence.
// Language model: inputs_BT, targets_BT (int64 token ids; rows of the same memory, one token apart,
// so not contiguous), mask_BT (u8, 1 where the target counts), and with data.restart_at_documents
// segments_BT (int32, increasing by one at each document's border) and positions_BT (int64).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace birkhoff {

struct Batch {
  std::map<std::string, at::Tensor, std::less<>> fields;
  at::Tensor sample_ids_B;  // int64 [B]: epoch * samples per epoch + place in the epoch's order;
                            // keys the noise

  // The field; an Error(kData) that names the missing field and those there are.
  const at::Tensor& at(std::string_view name) const;
  bool has(std::string_view name) const { return fields.find(name) != fields.end(); }
  std::int64_t size() const { return sample_ids_B.size(0); }

  // All fields on this device: the same batch if they are there.
  Batch to(at::Device device) const;

  // Rows [begin, end) of every field, as views.
  Batch narrow(std::int64_t begin, std::int64_t end) const;
};

namespace field {
inline constexpr std::string_view kInputs = "inputs";
inline constexpr std::string_view kTargets = "targets";
inline constexpr std::string_view kMask = "mask";
inline constexpr std::string_view kSegments = "segments";
inline constexpr std::string_view kPositions = "positions";
}  // namespace field

}  // namespace birkhoff
