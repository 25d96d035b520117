// What the operators refuse: c10::Error of Python's ValueError, one line with the limit and the
// value. Sizes may be symbolic, and tensors without memory, except where said. Legend: kernels.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "attention/kernels/sorted_blocks/sorted_blocks.h"
#include "attention/pytorch/calls.h"

namespace birkhoff::ops {

// All of attention_in_blocks but the sizes of its tensors and the values of its masks.
void check_options(at::TensorList inputs, std::int64_t block, std::int64_t look_back,
                   std::int64_t look_ahead, bool causal, std::string_view combine, double dropout,
                   const std::optional<at::Tensor>& seed,
                   const std::optional<at::Tensor>& key_lengths,
                   const std::optional<at::Tensor>& segments);
// Masks are int64 of q's device.
void check_mask_types(const at::Tensor& q, const std::optional<at::Tensor>& key_lengths,
                      const std::optional<at::Tensor>& segments);
// 1 to kMostBlockTokens: what users may give, kWholeSequence not.
void check_block(std::int64_t block);
void check_iterations(std::int64_t iterations);

// Lengths [B] from 0 to L, document ids [B, L] that never decrease along a row. Values are read on
// the CPU only: elsewhere that would wait for the device. Tensors with memory.
void check_masks(const at::Tensor& q, const std::optional<at::Tensor>& key_lengths,
                 const std::optional<at::Tensor>& segments);

Combine combine_named(std::string_view name);

// The balance's causal forms and the ordinary one.
enum class Form { kFull, kPrefix, kCumulative, kNone };
Form form_named(std::string_view name);
// Scores of a balance and what else it takes. Tensors with memory.
void check_balance(const at::Tensor& scores, std::int64_t iterations, Form form);

}  // namespace birkhoff::ops
