// Loss over a held-out split, with the same bits for any number of ranks: the split is cut into
// micro-batches of a size that does not depend on the ranks, one rank computes each micro-batch
// whole, and the fp64 sums are added in the split's order.
//
// A model with memory (model.memory) reads the split in lanes: the sequences are cut into
// micro_batch contiguous parts of nearly equal length, and micro-batch i is sequence i of each
// part. A token sees the tokens before it in its part that its sequence and the memory hold. Each
// rank then computes all micro-batches, because each needs the one before.
//
// One exception: within a micro-batch, BLAS matrix products may round differently with a different
// number of threads. Compare bits only at equal threads per rank.
//
// Classifiers: the loss has no class weights, and the confusion matrix is a sum of integers.
//
// The nats of a document are added as whole multiples of 2^-24, so their order does not matter.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "cluster/base/collectives/process_group.h"
#include "data/batch/batch.h"
#include "models/model.h"
#include "runtime/reporting/figure_sums.h"
#include "runtime/reporting/reports.h"
#include "runtime/tasks/targets.h"

namespace birkhoff::configs {
class Evaluate;
}  // namespace birkhoff::configs

namespace birkhoff {

class Corpus;
class Task;

// What is evaluated.
struct EvaluationPlan {
  std::string split;
  std::int64_t num_sequences = 0;            // sequences read, from the split's start
  std::int64_t micro_batch = 0;              // sequences per forward pass
  std::shared_ptr<const Targets> targets{};  // null: only the loss is reported
  std::int64_t all_sequences = 0;            // sequences in the split
  // Each sequence continues the one at the same position of the micro-batch before it.
  bool in_lanes = false;
  // Also adds up the losses of this many documents; batches then have field::kDocuments.
  std::int64_t num_documents = 0;

  // Which figures cannot be computed, and why, in one line; empty: all can.
  std::string withheld() const;
};

// What to say of a split for which make_evaluator() returns null.
std::string no_targets_text(const std::string& split);

class Evaluator {
 public:
  // read(begin, end) returns windows [begin, end) of the split as a batch. Model and group must
  // outlive the evaluator.
  Evaluator(Model& model, ProcessGroup& group, EvaluationPlan plan,
            std::function<Batch(std::int64_t, std::int64_t)> read);

  // Collective over the group: rank j modulo size computes micro-batch j. After each micro-batch of
  // this rank it calls `stops` (all ranks equally often, so `stops` may be collective); once that
  // returns true, the evaluation ends without a result.
  std::optional<Evaluation> run(const std::function<bool()>& stops);
  const EvaluationPlan& plan() const { return plan_; }

 private:
  Model& model_;
  ProcessGroup& group_;
  const EvaluationPlan plan_;
  const std::function<Batch(std::int64_t, std::int64_t)> read_;
  const FigureSums figures_;
};

// Evaluates a model of the task as `what` says (the configuration's, or the settings that a user
// passes instead). Null if there is no target: each document is one token, which no token of its
// own document predicts. Model and group must outlive the evaluator. by_document: also computes
// Evaluation::documents, for a task whose targets are tokens of documents. Error(kData) if the
// corpus lacks what the task reads in that split.
std::unique_ptr<Evaluator> make_evaluator(const Task& task, const configs::Evaluate& what,
                                          const Corpus& corpus, Model& model, ProcessGroup& group,
                                          bool by_document = false);

}  // namespace birkhoff
