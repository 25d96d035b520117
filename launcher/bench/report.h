// What the verbs of `bench` share: clocks, medians, and a report in Markdown that can be pasted
// into docs/benchmarks. Local.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace birkhoff {

// Seconds of a steady clock.
double wall_seconds();

// The upper one of two middle values; `values` is not empty.
double median(std::vector<double> values);

// First line of a report: version of the program, processor, threads, instruction set, GPU where
// `device` is one, ranks where there are several, and the command line that was given.
std::string report_title(const std::vector<std::string>& arguments, at::Device device = at::kCPU,
                         int ranks = 1);

// Four significant digits, without an exponent where there are more.
std::string figure(double value);

// "| a | b |\n".
std::string table_row(const std::vector<std::string>& cells);
// The names of the columns and the line below them.
std::string table_head(const std::vector<std::string>& columns);

}  // namespace birkhoff
