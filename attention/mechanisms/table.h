// The mechanisms, each made in a file of its own. table.cpp lists them.
#pragma once

#include <memory>
#include <string>

#include "attention/logit_terms.h"
#include "attention/mechanism.h"

namespace birkhoff {

// What a mechanism is made from. `config` has its message; its values are in their ranges.
struct MakeArguments {
  const configs::Mechanism& config;
  const MechanismShape& shape;
  const std::string& prefix;  // of its parameters
  Parameters& parameters;
  const LogitTerms& terms;
};

std::unique_ptr<Mechanism> make_dense(const MakeArguments& m);
std::unique_ptr<Mechanism> make_block_local(const MakeArguments& m);
std::unique_ptr<Mechanism> make_sliding_window(const MakeArguments& m);
std::unique_ptr<Mechanism> make_sinkhorn(const MakeArguments& m);
std::unique_ptr<Mechanism> make_sinkhorn_mixture(const MakeArguments& m);
std::unique_ptr<Mechanism> make_routing(const MakeArguments& m);
std::unique_ptr<Mechanism> make_moba(const MakeArguments& m);
std::unique_ptr<Mechanism> make_sinkformer(const MakeArguments& m);
std::unique_ptr<Mechanism> make_sparse_transformer(const MakeArguments& m);
std::unique_ptr<Mechanism> make_sortcut(const MakeArguments& m);

}  // namespace birkhoff
