// Sums that a forward pass returns in addition to its loss, by name.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

namespace birkhoff {

using NamedSums = std::vector<std::pair<std::string, at::Tensor>>;

// A figure that a run reports: a named sum divided by another one.
struct Figure {
  std::string sum;  // also the figure's name
  std::string per;  // empty: the number of counted targets
};

// The same figure and sums with `prefix` before their names.
inline Figure with_prefix(const std::string& prefix, const Figure& figure) {
  return {prefix + figure.sum, figure.per.empty() ? "" : prefix + figure.per};
}

}  // namespace birkhoff
