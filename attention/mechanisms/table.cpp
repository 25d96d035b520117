// The table of mechanisms: one entry for each message of the oneof in
// configs/schema/attention.proto.
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

#include "attention/logit_terms.h"
#include "attention/mechanism.h"
#include "attention/mechanisms/block_local/block_local.h"
#include "attention/mechanisms/dense/dense.h"
#include "attention/mechanisms/moba/moba.h"
#include "attention/mechanisms/routing/routing.h"
#include "attention/mechanisms/sinkhorn/sinkhorn.h"
#include "attention/mechanisms/sinkhorn/sinkhorn_mixture.h"
#include "attention/mechanisms/sliding_window/sliding_window.h"
#include "cluster/base/error.h"
#include "configs/loader/check.h"
#include "configs/loader/message_text.h"
#include "configs/schema/attention.pb.h"

namespace birkhoff {
namespace {

using Kind = configs::Mechanism;

struct MakeArguments {
  const configs::Mechanism& config;
  const MechanismShape& shape;
  const std::string& prefix;
  Parameters& parameters;
  const LogitTerms& terms;
};

struct Entry {
  Kind::KindCase kind;
  std::unique_ptr<Mechanism> (*make)(const MakeArguments&);
};

const Entry kMechanisms[] = {
    {Kind::kDense,
     [](const MakeArguments& m) -> std::unique_ptr<Mechanism> {
       return std::make_unique<DenseAttention>(m.config.dense(), m.shape, m.terms);
     }},
    {Kind::kBlockLocal,
     [](const MakeArguments& m) -> std::unique_ptr<Mechanism> {
       return std::make_unique<BlockLocalAttention>(m.config.block_local(), m.shape, m.terms);
     }},
    {Kind::kSinkhorn,
     [](const MakeArguments& m) -> std::unique_ptr<Mechanism> {
       return std::make_unique<SinkhornAttention>(m.config.sinkhorn(), m.shape, m.prefix,
                                                  m.parameters, m.terms);
     }},
    {Kind::kSinkhornMixture,
     [](const MakeArguments& m) -> std::unique_ptr<Mechanism> {
       return std::make_unique<SinkhornMixtureMechanism>(m.config.sinkhorn_mixture(), m.shape,
                                                         m.prefix, m.parameters, m.terms);
     }},
    {Kind::kSlidingWindow,
     [](const MakeArguments& m) -> std::unique_ptr<Mechanism> {
       return std::make_unique<SlidingWindowAttention>(m.config.sliding_window(), m.shape, m.terms);
     }},
    {Kind::kMoba,
     [](const MakeArguments& m) -> std::unique_ptr<Mechanism> {
       return std::make_unique<MixtureOfBlockAttention>(m.config.moba(), m.shape, m.terms);
     }},
    {Kind::kRouting,
     [](const MakeArguments& m) -> std::unique_ptr<Mechanism> {
       return std::make_unique<RoutingAttention>(m.config.routing(), m.shape, m.prefix,
                                                 m.parameters, m.terms);
     }},
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
  const LogitTerms terms(config, shape, prefix, parameters);
  std::unique_ptr<Mechanism> mechanism = entry->make({config, shape, prefix, parameters, terms});
  const MechanismTraits traits = mechanism->traits();
  if (config.relative_positions().max_distance() > 0 && !traits.takes_relative_positions) {
    fail(ExitCode::kConfig,
         "relative_positions: not supported by this mechanism; remove it, or use block_local, "
         "sliding_window, sinkhorn (not with combine: add_logits), routing or moba");
  }
  if (shape.heads_of_keys() != shape.heads && traits.shares_query_key) {
    fail(ExitCode::kConfig,
         "share_query_key: true needs as many key heads as heads; remove the group's key_heads, or "
         "set share_query_key: false");
  }
  return mechanism;
}

}  // namespace birkhoff
