// Figures of attention maps: how far and how widely heads look, whether their weights are balanced,
// and how much they differ.
//
// Legend: L queries, S keys, T tokens, C channels.
#pragma once

#include <ATen/core/Tensor.h>

namespace birkhoff {

// The largest difference of a row sum, or of a column sum, from 1.
struct BalanceErrors {
  double rows = 0, columns = 0;
};
// Rows whose query sees no key have the sum 0, which is no error.
BalanceErrors balance_errors(const at::Tensor& map_LS);

// Means over the queries that see a key, whose weights are divided by their sum.
// The entropy of the weights, in nats.
double mean_entropy(const at::Tensor& map_LS);
// The weighted mean distance from the query to its keys, in tokens.
double mean_reach(const at::Tensor& map_LS);
// The Jensen-Shannon divergence of two heads' weights, in nats: between 0 and log 2 (Roy et al.
// 2021, table 4). NaN if no query sees a key in both.
double mean_divergence(const at::Tensor& map_LS, const at::Tensor& other_LS);

// |X - 1 m| / |X| for the rows of X and their mean m, in the norm sqrt(|X|_1 |X|_inf): 0 if all
// tokens have the same vector (Dong et al. 2021, "Attention is Not All You Need: Pure Attention
// Loses Rank Doubly Exponentially with Depth", section 2).
double distance_to_rank_one(const at::Tensor& x_TC);

}  // namespace birkhoff
