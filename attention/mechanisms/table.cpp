// The table of mechanisms: one entry for each message of the oneof in configs/attention.proto.
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

#include "attention/mechanism.h"
#include "attention/mechanisms/block_local/block_local.h"
#include "attention/mechanisms/dense/dense.h"
#include "attention/mechanisms/routing/routing.h"
#include "attention/mechanisms/sinkhorn/sinkhorn.h"
#include "attention/mechanisms/sinkhorn/sinkhorn_mixture.h"
#include "attention/mechanisms/sliding_window/sliding_window.h"
#include "cluster/base/error.h"
#include "configs/attention.pb.h"
#include "configs/check.h"
#include "configs/message_text.h"

namespace birkhoff {
namespace {

using Kind = configs::Mechanism;

struct MakeArguments {
  const configs::Mechanism& config;
  const MechanismShape& shape;
  const std::string& prefix;
  Parameters& parameters;
};

struct Entry {
  Kind::KindCase kind;
  std::unique_ptr<Mechanism> (*make)(const MakeArguments&);
};

const Entry kMechanisms[] = {
    {Kind::kDense,
     [](const MakeArguments& m) -> std::unique_ptr<Mechanism> {
       return std::make_unique<DenseAttention>(m.config.dense(), m.shape);
     }},
    {Kind::kBlockLocal,
     [](const MakeArguments& m) -> std::unique_ptr<Mechanism> {
       return std::make_unique<BlockLocalAttention>(m.config.block_local(), m.shape);
     }},
    {Kind::kSinkhorn,
     [](const MakeArguments& m) -> std::unique_ptr<Mechanism> {
       return std::make_unique<SinkhornAttention>(m.config.sinkhorn(), m.shape, m.prefix,
                                                  m.parameters);
     }},
    {Kind::kSinkhornMixture,
     [](const MakeArguments& m) -> std::unique_ptr<Mechanism> {
       return std::make_unique<SinkhornMixtureMechanism>(m.config.sinkhorn_mixture(), m.shape,
                                                         m.prefix, m.parameters);
     }},
    {Kind::kSlidingWindow,
     [](const MakeArguments& m) -> std::unique_ptr<Mechanism> {
       return std::make_unique<SlidingWindowAttention>(m.config.sliding_window(), m.shape);
     }},
    {Kind::kRouting,
     [](const MakeArguments& m) -> std::unique_ptr<Mechanism> {
       return std::make_unique<RoutingAttention>(m.config.routing(), m.shape, m.prefix,
                                                 m.parameters);
     }},
};

}  // namespace

std::unique_ptr<Mechanism> make_mechanism(const configs::Mechanism& config,
                                          const MechanismShape& shape, const std::string& prefix,
                                          Parameters& parameters, const ParallelGroups&) {
  check_values(config, SourceLocations(prefix));
  const auto entry = std::find_if(std::begin(kMechanisms), std::end(kMechanisms),
                                  [&](const Entry& e) { return e.kind == config.kind_case(); });
  if (entry == std::end(kMechanisms)) {
    const std::vector<std::string> names = oneof_names(*Kind::descriptor()->oneof_decl(0));
    fail(ExitCode::kConfig, "{}: no attention mechanism is chosen; set one of {}", prefix,
         fmt::join(names, ", "));
  }
  return entry->make({config, shape, prefix, parameters});
}

}  // namespace birkhoff
