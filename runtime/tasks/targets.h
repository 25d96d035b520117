// The targets of an evaluation, and what a task reports of them in addition to the loss.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "data/loader/target_counts.h"
#include "runtime/reporting/reports.h"

namespace birkhoff {

class Targets {
 public:
  virtual ~Targets() = default;

  // What one is: "token", "sequence".
  virtual std::string unit() const = 0;
  // How many the loss is a mean of.
  virtual std::int64_t count() const = 0;

  // Of labels: the number of classes, whose predictions an evaluation counts; else 0.
  virtual std::int64_t classes() const { return 0; }

  // For a model whose loss on all of them is `nats`: what each evaluation of a run reports, and
  // what `birkhoff eval` prints in addition.
  virtual TaskFigures figures(double /*nats*/) const { return {}; }
  virtual TaskFigures details(double /*nats*/) const { return {}; }
  // Which figures cannot be computed, and why, in one line; empty: all can.
  virtual std::string withheld() const { return ""; }
};

// Tokens of a text: bits per byte, and perplexity per token and word.
class TextTargets final : public Targets {
 public:
  explicit TextTargets(TargetCounts counts) : counts_(std::move(counts)) {}

  std::string unit() const override { return "token"; }
  std::int64_t count() const override { return counts_.tokens; }
  // bits_per_byte and bytes, unless they are withheld.
  TaskFigures figures(double nats) const override;
  TaskFigures details(double nats) const override;
  std::string withheld() const override;

 private:
  const TargetCounts counts_;
};

}  // namespace birkhoff
