// Shared by the subcommands of `bench`: clocks, medians, and a Markdown report that can be pasted
// into docs/benchmarks. Local.
#pragma once

#include <ATen/core/Tensor.h>

#include <ctime>
#include <string>
#include <vector>

#include "runtime/reporting/progress.h"

namespace birkhoff {

// Seconds of CPU time so far. clock: CLOCK_PROCESS_CPUTIME_ID or CLOCK_THREAD_CPUTIME_ID.
double processor_seconds(clockid_t clock);

// Returns the upper one if there are two middle values; `values` must not be empty.
double median(std::vector<double> values);

// First line of a report: version of the program, CPU, threads, instruction set, GPU if `device` is
// one, ranks if there are several, and the command line as it was given.
std::string report_title(const std::vector<std::string>& arguments, at::Device device = at::kCPU,
                         int ranks = 1);

// Four significant digits; values with more integer digits have no exponent.
std::string figure(double value);

// "| a | b |\n".
std::string table_row(const std::vector<std::string>& cells);
// The names of the columns and the line below them.
std::string table_head(const std::vector<std::string>& columns);

}  // namespace birkhoff
