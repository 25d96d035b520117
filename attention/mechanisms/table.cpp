// The table of mechanisms: one entry for each message of the oneof in
// configs/schema/attention.proto.
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

#include "attention/mechanisms/table.h"
#include "cluster/base/error.h"
#include "configs/loader/check.h"
#include "configs/loader/message_text.h"
#include "configs/schema/attention.pb.h"
#include "configs/schema/options.pb.h"

namespace birkhoff {
namespace {

using Kind = configs::Mechanism;

struct Entry {
  Kind::KindCase kind;
  std::unique_ptr<Mechanism> (*make)(const MakeArguments&);
};

constexpr Entry kMechanisms[] = {
    {Kind::kDense, make_dense},
    {Kind::kBlockLocal, make_block_local},
    {Kind::kSinkhorn, make_sinkhorn},
    {Kind::kSinkhornMixture, make_sinkhorn_mixture},
    {Kind::kSlidingWindow, make_sliding_window},
    {Kind::kMoba, make_moba},
    {Kind::kRouting, make_routing},
    {Kind::kSinkformer, make_sinkformer},
    {Kind::kSparseTransformer, make_sparse_transformer},
    {Kind::kSortcut, make_sortcut},
};

}  // namespace

std::unique_ptr<Mechanism> make_mechanism(const configs::Mechanism& config,
                                          const MechanismShape& shape, const std::string& prefix,
                                          Parameters& parameters) {
  check_values(config, SourceLocations(prefix));
  const auto entry = std::find_if(std::begin(kMechanisms), std::end(kMechanisms),
                                  [&](const Entry& e) { return e.kind == config.kind_case(); });
  if (entry == std::end(kMechanisms)) {
    const std::vector<std::string> names = oneof_names(*Kind::descriptor()->oneof_decl(0));
    fail(ExitCode::kConfig, "{}: no attention mechanism is chosen; set one of {}", prefix,
         fmt::join(names, ", "));
  }
  const auto* kind = Kind::descriptor()->FindFieldByNumber(entry->kind);
  const std::string& reason = kind->message_type()->options().GetExtension(configs::encoder_only);
  if (shape.causal && !reason.empty()) {
    fail(ExitCode::kConfig, "{}.{}: is for encoders, not for causal attention, because {}", prefix,
         kind->name(), reason);
  }
  const LogitTerms terms(config, shape, prefix, parameters);
  std::unique_ptr<Mechanism> mechanism = entry->make({config, shape, prefix, parameters, terms});
  const MechanismTraits traits = mechanism->traits();
  if (config.relative_positions().max_distance() > 0 && !traits.takes_relative_positions) {
    fail(ExitCode::kConfig,
         "relative_positions: not supported by this mechanism; remove them, or choose one that "
         "reads nearby keys or knows distances (docs/configuration.md, Mechanism)");
  }
  if (shape.distances && !traits.takes_sinusoidal_distances) {
    fail(ExitCode::kConfig,
         "model.positions relative_sinusoidal: not supported by this mechanism; choose dense, or "
         "other positions");
  }
  if (config.sink() && !traits.takes_sinks) {
    fail(ExitCode::kConfig, "sink: not supported by this mechanism; remove it");
  }
  if (shape.heads_of_keys() != shape.heads && traits.shares_query_key) {
    fail(ExitCode::kConfig,
         "share_query_key: true needs as many key heads as heads; remove the group's key_heads, or "
         "set share_query_key: false");
  }
  return mechanism;
}

}  // namespace birkhoff
