// The targets of an evaluation, and what a task reports of them in addition to the loss.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "runtime/reporting/reports.h"

namespace birkhoff {

class Targets {
 public:
  virtual ~Targets() = default;

  // What one is: "token", "sequence".
  virtual std::string unit() const = 0;
  // How many the loss is a mean of.
  virtual std::int64_t count() const = 0;

  // For a model whose loss on all of them is `nats`: what each evaluation of a run reports, and
  // what `birkhoff eval` prints in addition.
  virtual TaskFigures figures(double nats) const {
    (void)nats;
    return {};
  }
  virtual TaskFigures details(double nats) const {
    (void)nats;
    return {};
  }
  // Which figures cannot be computed, and why, in one line; empty: all can.
  virtual std::string withheld() const { return ""; }
};

}  // namespace birkhoff
