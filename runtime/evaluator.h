// Loss over a held-out split, with the same bits for every number of ranks: the split is cut into
// micro-batches of fixed size whatever the ranks, each is computed whole on one rank, and their
// fp64 sums are added in the split's order.
//
// One thing stays outside: within a micro-batch the matrix products of a BLAS may round differently
// with another number of threads. Compare bits at equal threads a rank.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "cluster/base/collectives/group.h"
#include "data/batch/batch.h"
#include "models/model.h"
#include "runtime/reporting/reports.h"

namespace birkhoff::configs {
class Config;
class Evaluate;
}  // namespace birkhoff::configs

namespace birkhoff {

class Corpus;

// What is evaluated.
struct EvaluationPlan {
  std::string split;
  std::int64_t num_windows = 0;  // sequences read, from the split's start
  std::int64_t micro_batch = 0;  // sequences of a forward pass
  double bytes = 0;              // raw bytes of text that the counted targets stand for
  std::int64_t all_windows = 0;  // sequences that the split has
};

// num_windows: those the split has (EvalReader). bytes is the split's, or the windows' share of it
// where config.sequences stops before the split's end. Error(kData) if the corpus lacks the split
// or stream.
EvaluationPlan plan_evaluation(const Corpus& corpus, const configs::Evaluate& config,
                               const std::string& stream, std::int64_t sequence_length,
                               std::int64_t num_windows);

class Evaluator {
 public:
  // read(begin, end) gives windows of the split as a batch. Model and group must outlive the
  // evaluator.
  Evaluator(Model& model, Group& group, EvaluationPlan plan,
            std::function<Batch(std::int64_t, std::int64_t)> read);

  // Collective over the group: micro-batch j is computed by rank j modulo size. Calls `tick` after
  // each of this rank's.
  Evaluation run(const std::function<void()>& tick = [] {});
  const EvaluationPlan& plan() const { return plan_; }

 private:
  Model& model_;
  Group& group_;
  const EvaluationPlan plan_;
  const std::function<Batch(std::int64_t, std::int64_t)> read_;
};

// Evaluates a model of `config` as `what` says (config.evaluate(), or what a user asks for
// instead). Model and group must outlive the evaluator. Errors as plan_evaluation().
std::unique_ptr<Evaluator> make_evaluator(const configs::Config& config,
                                          const configs::Evaluate& what, const Corpus& corpus,
                                          Model& model, Group& group);

}  // namespace birkhoff
