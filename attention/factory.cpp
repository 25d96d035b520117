#include "attention/attention.h"
#include "attention/block_local.h"
#include "attention/dense.h"
#include "attention/sinkhorn_attention.h"
#include "attention/sinkhorn_mixture.h"
#include "cluster/base/error.h"
#include "configs/attention.pb.h"

namespace birkhoff {
namespace {

void check(bool good, const char* field, double value, const char* allowed,
           const std::string& prefix) {
  if (good) return;
  fail(ExitCode::kConfig, "{} is {} (in {}); it must be {}", field, value, prefix, allowed);
}

void check_dropout(const char* field, float dropout, const std::string& prefix) {
  check(dropout >= 0 && dropout < 1, field, dropout, "in [0, 1)", prefix);
}

void check_sinkhorn(const configs::SinkhornAttention& config, const std::string& prefix) {
  check(config.block() >= 1, "sinkhorn.block", config.block(), "at least 1", prefix);
  check(config.max_blocks() >= 0, "sinkhorn.max_blocks", config.max_blocks(), "at least 0", prefix);
  check(config.iterations() >= 0, "sinkhorn.iterations", config.iterations(), "at least 0", prefix);
  check(config.top_m() >= 0, "sinkhorn.top_m", config.top_m(), "at least 0", prefix);
  check(config.temperature() > 0, "sinkhorn.temperature", config.temperature(), "above 0", prefix);
  check_dropout("sinkhorn.dropout", config.dropout(), prefix);
}

}  // namespace

std::unique_ptr<Mechanism> make_mechanism(const configs::Mechanism& config,
                                          const MechanismShape& shape, const std::string& prefix,
                                          Parameters& parameters, const ParallelGroups&) {
  switch (config.kind_case()) {
    case configs::Mechanism::kDense:
      check_dropout("dense.dropout", config.dense().dropout(), prefix);
      return std::make_unique<DenseAttentionMechanism>(config.dense(), shape);
    case configs::Mechanism::kBlockLocal: {
      const configs::BlockLocalAttention& local = config.block_local();
      check(local.block() >= 1, "block_local.block", local.block(), "at least 1", prefix);
      check(local.look_back() == 0 || local.look_back() == 1, "block_local.look_back",
            local.look_back(), "0 or 1", prefix);
      check_dropout("block_local.dropout", local.dropout(), prefix);
      return std::make_unique<BlockLocalMechanism>(local, shape);
    }
    case configs::Mechanism::kSinkhorn:
      check_sinkhorn(config.sinkhorn(), prefix);
      return std::make_unique<SinkhornMechanism>(config.sinkhorn(), shape, prefix, parameters);
    case configs::Mechanism::kSinkhornMixture:
      check_sinkhorn(config.sinkhorn_mixture().sinkhorn(), prefix);
      check_dropout("dense.dropout", config.sinkhorn_mixture().dense().dropout(), prefix);
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
