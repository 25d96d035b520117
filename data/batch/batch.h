// A batch: named fields, as the corpus manifest declares them, and the ids of its samples.
//
// Legend: B batch, T tokens of a sequence, S tokens of a source.
//
// Language models have inputs_BT and targets_BT (int64 token ids; rows of the same memory, one
// token apart, so not contiguous), mask_BT (u8, 1 where the target counts) and, with
// data.restart_at_documents, segments_BT (int32, which increases by one at each document boundary)
// and positions_BT (int64). An evaluation may ask for documents_BT (int64): the number of the
// document that holds each target.
//
// With model.memory they also have past (in the dtype of the parameters [B, layers, M, channels]):
// the inputs of the layers at the M tokens before the sequence; none at the start of a text. It
// comes from the step before, not from the loader.
//
// Classifiers have inputs_BT, padded with 0, lengths_B (int64, tokens of each sequence, at least 1)
// and, except to classify, labels_B (int64). Classifiers of two texts by themselves have
// inputs [B, 2, T] and lengths [B, 2].
//
// Models of pairs have inputs_BS and lengths_B (of the sources), previous_BT (int64, the tokens
// before the targets: an end mark, then the targets without the last one), targets_BT and mask_BT.
// Targets are padded with 0, and previous tokens with the end mark.
//
// Models of images have images (u8 [B, rows, columns, channels]) and, to classify them, labels_B.
// Classifiers of point sets have points (fp32 [B, points, dimensions]) and labels_B.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace birkhoff {

struct Batch {
  std::map<std::string, at::Tensor, std::less<>> fields;
  at::Tensor sample_ids_B;  // int64 [B]: epoch * samples per epoch + position in the epoch's order;
                            // keys the noise
  // Samples of the global batch, on all ranks: the position in the data advances by this number.
  std::int64_t global_size = 0;
  // A sequence with segments has at most this many documents. 0: they were not counted.
  std::int64_t num_documents = 0;

  // Returns the field. If there is none, Error(kData) names it and the fields that exist.
  const at::Tensor& at(std::string_view name) const;
  bool has(std::string_view name) const { return fields.find(name) != fields.end(); }
  std::int64_t size() const { return sample_ids_B.size(0); }

  // The batch with all fields on this device. Fields that are already there are not copied.
  Batch to(at::Device device) const;

  // Rows [begin, end) of every field, as views.
  Batch narrow(std::int64_t begin, std::int64_t end) const;
};

namespace field {
inline constexpr std::string_view kInputs = "inputs";
inline constexpr std::string_view kPrevious = "previous";
inline constexpr std::string_view kTargets = "targets";
inline constexpr std::string_view kMask = "mask";
inline constexpr std::string_view kSegments = "segments";
inline constexpr std::string_view kPositions = "positions";
inline constexpr std::string_view kDocuments = "documents";
inline constexpr std::string_view kPast = "past";
inline constexpr std::string_view kLengths = "lengths";
inline constexpr std::string_view kLabels = "labels";
inline constexpr std::string_view kImages = "images";
inline constexpr std::string_view kPoints = "points";
}  // namespace field

}  // namespace birkhoff
