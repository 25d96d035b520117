#include "attention/attention.h"
#include "attention/block_local.h"
#include "attention/dense.h"
#include "attention/sinkhorn_attention.h"
#include "attention/sinkhorn_mixture.h"
#include "cluster/base/error.h"
#include "configs/attention.pb.h"
#include "configs/check.h"

namespace birkhoff {

std::unique_ptr<Mechanism> make_mechanism(const configs::Mechanism& config,
                                          const MechanismShape& shape, const std::string& prefix,
                                          Parameters& parameters, const ParallelGroups&) {
  check_values(config, Places(prefix));
  switch (config.kind_case()) {
    case configs::Mechanism::kDense:
      return std::make_unique<DenseAttentionMechanism>(config.dense(), shape);
    case configs::Mechanism::kBlockLocal:
      return std::make_unique<BlockLocalMechanism>(config.block_local(), shape);
    case configs::Mechanism::kSinkhorn:
      return std::make_unique<SinkhornMechanism>(config.sinkhorn(), shape, prefix, parameters);
    case configs::Mechanism::kSinkhornMixture:
      return std::make_unique<SinkhornMixtureMechanism>(config.sinkhorn_mixture(), shape, prefix,
                                                        parameters);
    case configs::Mechanism::KIND_NOT_SET:
      break;
  }
  fail(ExitCode::kConfig,
       "{}: no attention mechanism is chosen; set one of dense, block_local, sinkhorn or "
       "sinkhorn_mixture",
       prefix);
}

}  // namespace birkhoff
