// The linear maps of an attention layer: from its inputs to queries, keys and values of each head
// group.
//
// Legend: B batch, T tokens, M tokens before them, S tokens of the memory, C channels, H heads of a
// group (keys and values may have fewer than queries), D head dim.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "models/transformer/layers.h"

namespace birkhoff::configs {
class Model;
}

namespace birkhoff {

// What the heads read keys and values from.
enum class KeySource { kOwnSequence, kMemory };

// The channels of what queries, and keys and values, are computed from. Without a memory they are
// the same.
struct InputWidths {
  std::int64_t queries = 0, keys = 0;
};

// Which projections a head group has.
struct GroupProjections {
  std::int64_t heads = 0;      // of queries, on this rank
  std::int64_t key_heads = 0;  // of keys and values, on this rank
  bool has_key = true;         // false: the queries are also the keys
  bool has_value = true;       // false: the keys are also the values
};

class HeadProjections {
 public:
  // Each group's queries, keys and values. A group without keys gets its queries, a group without
  // values its keys: the same tensor. Parts that were not asked for are empty.
  struct Heads {
    std::vector<at::Tensor> q_BHTD, k_BHTD, v_BHTD;
  };

  // Adds "<name>.query_key_value", or with a memory "<name>.query" and "<name>.key_value".
  // Error(kInternal) if a group without keys reads a memory.
  HeadProjections(const configs::Model& config, std::vector<GroupProjections> groups,
                  KeySource source, const InputWidths& inputs, const std::string& name,
                  Parameters& parameters);

  // For heads that read their own sequence. Also returns x of all tokens.
  std::pair<Heads, at::Tensor> all(const at::Tensor& x_BTC, const TokenSlices& tokens) const;
  // The keys and values of tokens before the sequence, from their inputs. For heads that read their
  // own sequence, on one rank of the tensor axis.
  Heads earlier_keys_and_values(const at::Tensor& past_BMC) const;
  // For heads that read a memory: of the sequence, also with x of all tokens, and of the memory.
  std::pair<Heads, at::Tensor> queries(const at::Tensor& x_BTC, const TokenSlices& tokens) const;
  std::pair<Heads, at::Tensor> keys_and_values(const at::Tensor& memory_BSC,
                                               const TokenSlices& tokens) const;

  // Of that number of tokens; with a memory, of `num_keys` tokens of the memory as well. Heads that
  // read their own sequence project the keys and values of the tokens before it, too.
  double flops(std::int64_t num_queries, std::int64_t num_keys) const;

 private:
  // The widths of the parts of the outputs, in order, on this rank.
  std::vector<std::int64_t> widths(bool with_queries, bool with_keys) const;
  std::int64_t query_width() const;  // of all groups, on this rank
  Heads split(const at::Tensor& outputs, bool with_queries, bool with_keys) const;

  std::int64_t head_dim_;
  std::vector<GroupProjections> groups_;
  // query_key_value_ outputs the queries of all groups, then the keys of the groups that have keys,
  // then the values of the groups that have values. With a memory these are the outputs of query_,
  // then of key_value_.
  std::optional<Linear> query_key_value_, query_, key_value_;
};

}  // namespace birkhoff
