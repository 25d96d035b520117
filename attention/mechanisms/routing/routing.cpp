// Legend: B batch, H heads, L tokens, D head dim, K clusters.
#include "attention/mechanisms/routing/routing.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <array>
#include <limits>

#include "attention/kernels/clusters/cluster_figures.h"
#include "attention/kernels/clusters/dense_mass.h"
#include "attention/mechanisms/table.h"
#include "cluster/base/error.h"

namespace birkhoff {
namespace {

using RoutingConfig = configs::RoutingAttention;

// Every kCompared-th row's clusters before and after the last update are compared.
constexpr std::int64_t kCompared = 16;

Documents documents_of(const AttentionInput& in) {
  return {in.segments_q_BL, in.key_lengths_B, in.q_BHLD, in.num_documents};
}

std::int64_t window_of(const RoutingConfig& config, const MechanismShape& shape) {
  if (config.window() > 0) return std::min<std::int64_t>(config.window(), shape.sequence_length);
  return std::max<std::int64_t>(
      1, (shape.sequence_length + config.clusters() - 1) / config.clusters());
}

// Lists count slots in 32 bits.
void check_slots(const RoutingConfig& config, std::int64_t window) {
  const std::int64_t most = std::numeric_limits<std::int32_t>::max();
  if (config.clusters() * window > most) {
    fail(ExitCode::kConfig,
         "routing: clusters: {} of up to {} tokens are {} slots, above {}; lower clusters or "
         "window",
         config.clusters(), window, config.clusters() * window, most);
  }
}

// The clusters of every kCompared-th row before the last update of the centroids, int32 [B, H, M].
at::Tensor clusters_before(const ClusterProblem& problem, const at::Tensor& previous_HKD,
                           Path limit) {
  ClusterProblem before = problem;
  before.x_BHLD = problem.x_BHLD.detach().slice(2, 0, std::nullopt, kCompared);
  before.centroids_HKD = previous_HKD.to(problem.centroids_HKD.scalar_type());
  before.documents.number_BL =
      problem.documents.number_BL.slice(1, 0, std::nullopt, kCompared).contiguous();
  before.window = 0;
  return cluster_rows(before, limit).cluster_BHL;
}

// [B, H, L, K]: 1 where a row is in a cluster.
at::Tensor memberships(const ClusteredRows& rows, std::int64_t clusters) {
  const at::Tensor cluster_BHL = rows.cluster_BHL.to(at::kLong);
  if (!rows.nearest_BHP.defined()) {
    const at::Tensor exists_BHL1 = cluster_BHL.ge(0).unsqueeze(3);
    return at::one_hot(cluster_BHL.clamp_min(0), clusters) * exists_BHL1;
  }
  const at::Tensor row_BHP = rows.nearest_BHP.to(at::kLong),
                   slot_BHP = at::arange(row_BHP.size(2), row_BHP.options()).expand_as(row_BHP),
                   segment_BHP = at::searchsorted(rows.nearest_ends_BHG.to(at::kLong),
                                                  slot_BHP.contiguous(), /*out_int32=*/false,
                                                  /*right=*/true);
  // Slots after the last segment are not used. Segments are clusters of document after document.
  const at::Tensor used_BHP = segment_BHP.lt(rows.nearest_ends_BHG.size(2));
  const at::Tensor index_BHP = (row_BHP * clusters + segment_BHP % clusters) * used_BHP;
  return at::zeros({cluster_BHL.size(0), cluster_BHL.size(1), cluster_BHL.size(2) * clusters},
                   row_BHP.options())
      .scatter_add_(2, index_BHP, used_BHP.to(at::kLong))
      .clamp_max_(1)
      .unflatten(2, {-1, clusters});
}

// Adds sums of the same names in the same order.
void add(const NamedSums& from, NamedSums& to) {
  for (std::size_t i = 0; i < from.size(); ++i) {
    require(from[i].first == to[i].first, "routing: sums have different names");
    to[i].second = to[i].second + from[i].second;
  }
}

}  // namespace

RoutingAttention::RoutingAttention(const RoutingConfig& config, const MechanismShape& shape,
                                   const std::string& prefix, Parameters& parameters,
                                   const LogitTerms& terms)
    : config_(config),
      shape_(shape),
      window_(window_of(config, shape)),
      length_(length_for(config.logit_scale(), shape.head_dim)),
      all_key_heads_(shape.heads_of_keys() * parameters.place().tensor_size),
      centroids_({.clusters = config.clusters(),
                  .decay = config.decay(),
                  .reseed_after = config.reseed_after()},
                 shape.heads_of_keys(), shape.head_dim, prefix, parameters),
      terms_(terms) {
  check_slots(config, window_);
}

RoutingConfig::CausalSelection RoutingAttention::selection() const {
  return shape_.causal ? config_.causal_selection() : RoutingConfig::full_topw;
}

ClusterAttention RoutingAttention::problem(const AttentionInput& in,
                                           const Documents& documents) const {
  const RoutingConfig::CausalSelection chosen = selection();
  const bool nearest = chosen == RoutingConfig::full_topw;
  return {.q_BHLD = in.q_BHLD,
          .k_BHLD = config_.share_query_key() ? at::Tensor() : in.k_BHSD,
          .v_BHLD = in.v_BHSD,
          .centroids_HKD = centroids_.directions().to(at::toOpMathType(in.q_BHLD.scalar_type())),
          .documents = documents,
          .length = length_,
          .selection = !nearest        ? ClusterSelection::kCausalBucket
                       : shape_.causal ? ClusterSelection::kNearestCausal
                                       : ClusterSelection::kNearest,
          .window = window_,
          .merge = merge(),
          .relative = terms_.relative(in.q_BHLD),
          .sink_H = terms_.sink(in.q_BHLD),
          .dropout = config_.dropout(),
          .noise = in.noise};
}

AttentionOutput RoutingAttention::attend(const AttentionInput& in, Path limit) const {
  require(in.q_BHLD.size(2) == in.k_BHSD.size(2),
          "routing attention needs as many keys as queries");
  const ClusterAttention attention = problem(in, documents_of(in));
  const ClusteredTokens tokens = cluster_tokens(attention, limit);
  const bool of_prefixes = selection() == RoutingConfig::prefix_topw;

  at::Tensor mass = at::zeros({}, attention.centroids_HKD.options());
  AttentionOutput output{of_prefixes ? attend_prefixes(attention, tokens, mass)
                                     : attend_in_clusters(attention, tokens, limit),
                         {}};
  output.sums.emplace_back(
      "auxiliary_loss",
      tokens.distance_BH().sum(1) *
          (config_.commitment() / static_cast<double>(all_key_heads_ * shape_.head_dim)));
  at::NoGradGuard no_grad;
  NamedSums figures = figure_sums(tokens.of_q, tokens.q, limit);
  if (!tokens.shared) add(figure_sums(tokens.of_k, tokens.k, limit), figures);
  output.sums.insert(output.sums.end(), figures.begin(), figures.end());
  if (config_.measure_dense_mass()) {
    if (!of_prefixes) mass = dense_mass(attention, tokens);
    const at::Tensor exists_BL =
        attention.documents.number_BL.ge(0).expand({in.q_BHLD.size(0), in.q_BHLD.size(2)});
    output.sums.emplace_back("dense_mass", mass);
    output.sums.emplace_back("queries", (exists_BL.sum() * shape_.heads).to(mass.scalar_type()));
  }
  if (in.noise) {
    const at::Tensor seeds = centroids_.new_seeds(tokens.of_k, tokens.k, *in.noise, limit);
    output.sums.emplace_back(Centroids::kName, at::cat({tokens.sums(limit), seeds}, 2));
  }
  return output;
}

std::vector<Choice> RoutingAttention::choices(const AttentionInput& in) const {
  if (selection() == RoutingConfig::prefix_topw) return {};  // each query has its own selection
  const ClusterAttention attention = problem(in, documents_of(in));
  const ClusteredTokens tokens = cluster_tokens(attention, Path::kReference);
  if (tokens.shared) return {{"clusters of tokens", memberships(tokens.q, config_.clusters())}};
  return {{"clusters of queries", memberships(tokens.q, config_.clusters())},
          {"clusters of keys", memberships(tokens.k, config_.clusters())}};
}

NamedSums RoutingAttention::figure_sums(const ClusterProblem& problem, const ClusteredRows& rows,
                                        Path limit) const {
  static constexpr std::array<const char*, kNumClusterFigures> kNames{
      "moved_tokens", "compared_tokens", "largest_cluster", "tokens", "dead_clusters", "clusters"};
  const at::Tensor counts =
      count_clusters({.cluster_BHL = rows.cluster_BHL,
                      .before_BHM = clusters_before(problem, centroids_.previous(), limit),
                      .compared = kCompared,
                      .idle_steps_HK = centroids_.idle_steps().to(problem.centroids_HKD.options())},
                     limit);
  NamedSums sums;
  for (std::size_t f = 0; f < kNames.size(); ++f) {
    sums.emplace_back(kNames[f], counts.select(0, static_cast<std::int64_t>(f)));
  }
  return sums;
}

MechanismTraits RoutingAttention::traits() const {
  const bool causal = shape_.causal, buckets = selection() == RoutingConfig::causal_bucket;
  MechanismTraits traits{.causal = causal && selection() != RoutingConfig::full_topw,
                         .exact_in_decoding = causal && selection() != RoutingConfig::full_topw,
                         .shares_query_key = config_.share_query_key(),
                         .convex = buckets && config_.share_query_key() && terms_.is_convex(),
                         .selects = true,
                         .skips_queries = !(buckets && config_.share_query_key()),
                         .discontinuous = true,
                         .takes_relative_positions = true,
                         .chooses_keys = true,
                         .clusters = true,
                         .quadratic = selection() == RoutingConfig::prefix_topw};
  if (causal && selection() == RoutingConfig::full_topw) {
    traits.leak =
        "routing with causal_selection: full_topw chooses the tokens of a cluster from the whole "
        "sequence, so that later tokens decide what earlier ones see; evaluate it with "
        "causal_selection: prefix_topw";
  }
  traits.figures = {{"auxiliary_loss", ""},
                    {"moved_tokens", "compared_tokens"},
                    {"largest_cluster", "tokens"},
                    {"dead_clusters", "clusters"}};
  if (config_.measure_dense_mass()) traits.figures.push_back({"dense_mass", "queries"});
  return traits;
}

at::Tensor RoutingAttention::visible_keys(std::int64_t num_queries, std::int64_t num_keys) const {
  const at::Tensor all_LS = at::ones({num_queries, num_keys}, at::kBool);
  return shape_.causal ? all_LS.tril() : all_LS;
}

double RoutingAttention::forward_flops(std::int64_t num_tokens) const {
  const double n = static_cast<double>(num_tokens), k = config_.clusters(),
               w = static_cast<double>(std::min(window_, num_tokens));
  const double scores = (config_.share_query_key() ? 1 : 2) * n * k;
  double pairs = 0;
  if (selection() == RoutingConfig::causal_bucket) {
    // Assumes clusters of equal size: in a cluster of m tokens a query sees min(rank + 1, w).
    const double m = std::max(1.0, n / k), few = std::min(m, w);
    pairs = (n / m) * (few * (few + 1) / 2 + (m - few) * w);
  } else {
    pairs = k * (shape_.causal ? w * (w + 1) / 2 : w * w);
  }
  const double heads = static_cast<double>(shape_.heads), D = static_cast<double>(shape_.head_dim);
  return 2 * scores * static_cast<double>(shape_.heads_of_keys()) * D + 4 * pairs * heads * D +
         n * heads * terms_.forward_flops();
}

std::unique_ptr<Mechanism> make_routing(const MakeArguments& m) {
  return std::make_unique<RoutingAttention>(m.config.routing(), m.shape, m.prefix, m.parameters,
                                            m.terms);
}

}  // namespace birkhoff
