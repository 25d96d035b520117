#include "attention/attention.h"
#include "attention/dense.h"
#include "cluster/base/error.h"
#include "configs/attention.pb.h"

namespace birkhoff {

std::unique_ptr<Mechanism> make_mechanism(const configs::Mechanism& config,
                                          const MechanismShape& shape, const std::string& prefix,
                                          Parameters&, const ParallelGroups&) {
  switch (config.kind_case()) {
    case configs::Mechanism::kDense:
      return std::make_unique<DenseAttentionMechanism>(config.dense(), shape);
    case configs::Mechanism::kBlockLocal:
    case configs::Mechanism::kSinkhorn:
    case configs::Mechanism::kSinkhornMixture:
    case configs::Mechanism::KIND_NOT_SET:
      break;
  }
  fail(ExitCode::kConfig,
       "{}: no attention mechanism is chosen; set one of dense, block_local, sinkhorn or "
       "sinkhorn_mixture",
       prefix);
}

}  // namespace birkhoff
