// Checks of the operators' arguments. Each throws c10::ValueError (in Python: ValueError), one line
// with the limit and the value. Sizes may be symbolic, and tensors may be without memory, unless a
// comment says otherwise. Legend: calls.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "attention/kernels/sorted_blocks/sorted_blocks.h"
#include "attention/pytorch/calls.h"

namespace birkhoff::ops {

// Checks the number, dims, dtypes and devices of an operator's inputs (calls.h).
void check_inputs(at::TensorList inputs, bool may_have_weights);
// Checks that there are `count` inputs, and the dims, dtypes and devices of q, k and v.
void check_heads(at::TensorList inputs, std::size_t count);
// Checks the sizes of q, k and v; if `square`, there are as many keys as queries. Tensors must have
// memory.
void check_sizes_of_heads(at::TensorList inputs, bool square);
// The name and shape of an input.
struct InputForm {
  const char *name, *sizes;
  std::int64_t dim;
};
// Checks the dim, dtype (floating) and device of an input.
void check_input(const InputForm& form, const at::Tensor& x, const at::Tensor& q);
// Checks the sizes of all inputs but block weights; if `square`, there are as many keys as queries.
// Tensors must have memory.
void check_sizes_of_inputs(at::TensorList inputs, bool causal, bool square = true);
// Checks everything about a call except the sizes of its tensors and the values of its masks.
void check_options(at::TensorList inputs, const AttentionInBlocks& call);
void check_dropout(double dropout, const std::optional<at::Tensor>& seed, const at::Tensor& q);
// Checks that masks are int64 and on q's device.
void check_mask_types(const at::Tensor& q, const std::optional<at::Tensor>& key_lengths,
                      const std::optional<at::Tensor>& segments);
// Checks a block size that users give: 1 to kMaxBlockTokens, not kWholeSequence.
void check_block(std::int64_t block);
void check_iterations(std::int64_t iterations);
void check_between(const char* name, std::int64_t value, std::int64_t least, std::int64_t most);
void check_dtype(const char* name, const at::Tensor& x, at::ScalarType dtype);
// Checks that x, if there is one, is int64 and on q's device.
void check_integers(const char* name, const std::optional<at::Tensor>& x, const at::Tensor& q);
void check_device(const char* name, const at::Tensor& x, const at::Tensor& q);

// Checks lengths [B] from 0 to x.size(2), as check_masks().
void check_lengths(const char* name, const std::optional<at::Tensor>& lengths, const at::Tensor& x);
// Checks lengths [B] from 0 to L and document ids [B, L] that never decrease along a row. Values
// are read only on the CPU: elsewhere that would wait for the device. Tensors must have memory.
void check_masks(const at::Tensor& q, const std::optional<at::Tensor>& key_lengths,
                 const std::optional<at::Tensor>& segments);

Combine combine_named(std::string_view name);

// The ordinary balance and its causal forms.
enum class Form { kFull, kPrefix, kCumulative, kNone };
Form form_named(std::string_view name);
// Checks the scores and the options of a balance. Tensors must have memory.
void check_balance(const at::Tensor& scores, std::int64_t iterations, Form form);

}  // namespace birkhoff::ops
