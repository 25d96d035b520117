// Targets that are the tokens of a text: bits per byte, and perplexity per token and word.
#pragma once

#include <string>
#include <utility>

#include "data/loader/target_counts.h"
#include "runtime/tasks/targets.h"

namespace birkhoff {

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
