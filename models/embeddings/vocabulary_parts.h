// The parts of a vocabulary with model.adaptive_softmax (Grave et al. 2017, "Efficient softmax
// approximation for GPUs", section 4): a head of frequent ids, and tails of rarer and rarer ones.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cluster/base/interval.h"

namespace birkhoff::configs {
class Model;
}

namespace birkhoff {

struct VocabularyPart {
  Interval ids;
  std::int64_t width = 0;  // columns of its tables
};

// The head, then the tails; without adaptive softmax one part. Error(kConfig) if a tail has no ids.
std::vector<VocabularyPart> vocabulary_parts(const configs::Model& config, std::int64_t vocabulary);
// The parts of the embedding table: one if model.adaptive_softmax.inputs is false.
std::vector<VocabularyPart> embedding_parts(const configs::Model& config, std::int64_t vocabulary);

// The end of the names of part `number`'s layers: "" for the head, ".tails.0" for the first tail.
std::string tail_name(std::size_t number);

// The estimated share of tokens whose id is in the part: id n has a frequency proportional to
// 1 / (n + 1) (Zipf's law).
double zipf_share(const Interval& ids, std::int64_t vocabulary);
// Ids (int64) with these frequencies from uniform numbers in [0, 1), of the same shape.
at::Tensor zipf_ids(const at::Tensor& uniform, std::int64_t vocabulary);

}  // namespace birkhoff
