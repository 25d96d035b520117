// Reports of a training for the tests of what reports them.
#pragma once

#include <cstdint>
#include <utility>

#include "runtime/reporting/reports.h"

namespace birkhoff {

inline StepReport report_at(std::int64_t step, double loss) {
  StepReport report;
  report.step = step;
  report.loss = loss;
  report.tokens = step * 100;
  report.step_ms = 50;
  report.loader_wait_ms = 0.5;
  report.learning_rate = 0.001;
  report.grad_norm = 0.5;
  return report;
}

// With one bit per byte.
inline Evaluation evaluation_of(double loss, FigureValues figures = {}) {
  return {.loss = loss,
          .tokens = 10,
          .task = {{{"bits_per_byte", 1, "1.0000 bits per byte"}}, {{"bytes", 40, "40 bytes"}}},
          .figures = std::move(figures)};
}

}  // namespace birkhoff
