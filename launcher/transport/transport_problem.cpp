// Legend: R sources, C targets, K coordinates of a point.
#include "launcher/transport/transport_problem.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "cluster/base/text/number_text.h"
#include "cluster/base/text/plural.h"
#include "cluster/base/text/utf8.h"
#include "data/text/text_lines.h"

namespace birkhoff {
namespace {

// Of a cost matrix. Solving needs a few times its 512 MiB.
constexpr std::int64_t kMaxCells = std::int64_t{1} << 26;

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && is_white_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_white_space(text.back())) text.remove_suffix(1);
  return text;
}

// Commas separate the cells of a line, or else tabs, or else white space.
std::vector<std::string_view> cells_of(std::string_view line) {
  char separator = ' ';
  for (const char candidate : {'\t', ','}) {
    if (line.find(candidate) != std::string_view::npos) separator = candidate;
  }
  std::vector<std::string_view> cells;
  for (std::string_view rest = separator == ' ' ? trimmed(line) : line;;) {
    const std::size_t end = rest.find(separator);
    cells.push_back(trimmed(rest.substr(0, end)));
    if (end == std::string_view::npos) return cells;
    rest.remove_prefix(end + 1);
    if (separator == ' ') rest = trimmed(rest);
  }
}

// The numbers of a file as a matrix, one row for each line that is not blank.
at::Tensor read_matrix(const std::string& path) {
  File file = File::open_stream_for_read(path, ExitCode::kUsage);
  file.wait_for_input();
  TextLines lines(std::move(file), path);
  std::vector<double> values;
  std::int64_t rows = 0;
  while (const std::optional<std::string_view> line = lines.next()) {
    if (trimmed(*line).empty()) continue;
    const std::vector<std::string_view> cells = cells_of(*line);
    ++rows;
    for (const std::string_view cell : cells) {
      const std::optional<double> value = parse_number<double>(cell);
      if (!value || !std::isfinite(*value)) {
        fail(ExitCode::kData,
             "{}: '{}' is not a finite number; a file holds only numbers, without a header",
             lines.place(), cell.substr(0, 40));
      }
      values.push_back(*value);
    }
    const auto width = static_cast<std::int64_t>(cells.size());
    if (width * rows != static_cast<std::int64_t>(values.size())) {
      fail(ExitCode::kData, "{}: the line has {}, the lines before it {} each", lines.place(),
           counted(width, "number"),
           (static_cast<std::int64_t>(values.size()) - width) / (rows - 1));
    }
    if (width * rows > kMaxCells)
      fail(ExitCode::kData, "{}: more than {} numbers", lines.place(), kMaxCells);
  }
  if (rows == 0) fail(ExitCode::kData, "{}: holds no numbers", path);
  return at::tensor(values, at::kDouble).view({rows, -1});
}

// The numbers of a file in one row or one column.
at::Tensor read_vector(const std::string& path) {
  const at::Tensor matrix = read_matrix(path);
  if (matrix.size(0) != 1 && matrix.size(1) != 1) {
    fail(ExitCode::kData, "{}: holds {} x {} numbers, not one row or one column", path,
         matrix.size(0), matrix.size(1));
  }
  return matrix.flatten();
}

// Masses of a file, or equal ones with the total 1.
at::Tensor masses(const std::string& path, std::int64_t count, const char* what) {
  if (path.empty()) return at::full({count}, 1.0 / static_cast<double>(count), at::kDouble);
  const at::Tensor read = read_vector(path);
  if (read.numel() != count) {
    fail(ExitCode::kData, "{}: holds {} for {}", path, counted(read.numel(), "mass", "masses"),
         counted(count, what));
  }
  return read;
}

void check_cells(std::int64_t rows, std::int64_t columns) {
  if (rows <= kMaxCells / columns) return;
  fail(ExitCode::kData, "{} sources and {} targets: the cost matrix has more than {} elements",
       rows, columns, kMaxCells);
}

at::Tensor squared_distances(const at::Tensor& from_RK, const at::Tensor& to_CK) {
  check_cells(from_RK.size(0), to_CK.size(0));
  at::Tensor sum_RC = at::zeros({from_RK.size(0), to_CK.size(0)}, at::kDouble);
  for (std::int64_t k = 0; k < from_RK.size(1); ++k) {
    sum_RC += (from_RK.select(1, k).unsqueeze(1) - to_CK.select(1, k)).square();
  }
  return sum_RC;
}

at::Tensor costs_of_points(const TransportArguments& arguments) {
  const at::Tensor from_RK = read_matrix(arguments.from), to_CK = read_matrix(arguments.to);
  if (from_RK.size(1) != to_CK.size(1)) {
    fail(ExitCode::kData, "{}: its points have {}, those of {} {}", arguments.to,
         counted(to_CK.size(1), "coordinate"), arguments.from, from_RK.size(1));
  }
  const at::Tensor squared_RC = squared_distances(from_RK, to_CK);
  return arguments.squared ? squared_RC : squared_RC.sqrt();
}

// The transport of values to the positions 0, 1/(R-1), .., 1 of their sorted order, with squared
// distances (Cuturi et al. 2019, "Differentiable Ranking and Sorting using Optimal Transport",
// section 2). The values are first moved to the same range: neither the order nor the optimal
// permutation changes, and the regularization has one meaning.
TransportProblem sort_problem(std::vector<double> values) {
  const auto count = static_cast<std::int64_t>(values.size());
  const at::Tensor x_R = at::tensor(values, at::kDouble);
  const double low = x_R.min().item<double>(), range = x_R.max().item<double>() - low;
  if (!std::isfinite(range))
    fail(ExitCode::kData, "the values to sort span more than fp64 can represent");
  const at::Tensor unit_R = (x_R - low) / (range > 0 ? range : 1.0);
  const at::Tensor ones = at::ones({count}, at::kDouble),
                   position_C = at::linspace(0, 1, count, at::kDouble);
  return {.transport = {.cost_RC = squared_distances(unit_R.unsqueeze(1), position_C.unsqueeze(1)),
                        .source_R = ones,
                        .target_C = ones},
          .values = std::move(values)};
}

TransportProblem example(const std::string& name) {
  const auto vector = [](std::vector<double> values) { return at::tensor(values, at::kDouble); };
  if (name == "factories") {
    const at::Tensor index = at::arange(5, at::kDouble);
    return {.transport = {.cost_RC = (index.unsqueeze(1) - index).abs(),
                          .source_R = vector({0.1, 0.2, 0.4, 0.2, 0.1}),
                          .target_C = vector({0.05, 0.05, 0.2, 0.3, 0.4})},
            .values = {}};
  }
  if (name == "assignment") {
    const at::Tensor ones = at::ones({5}, at::kDouble);
    return {.transport = {.cost_RC = vector({0.84, 0.76, 0.42, 0.26, 0.51,  //
                                             0.40, 0.78, 0.30, 0.48, 0.58,  //
                                             0.91, 0.50, 0.28, 0.76, 0.62,  //
                                             0.25, 0.91, 0.98, 0.81, 0.90,  //
                                             0.31, 0.73, 0.90, 0.68, 0.47})
                                         .view({5, 5}),
                          .source_R = ones,
                          .target_C = ones},
            .values = {}};
  }
  return sort_problem({3, 1, 2.5, -1, 7, 4.2});
}

}  // namespace

TransportProblem transport_problem(const TransportArguments& arguments) {
  const int stated = !arguments.cost.empty() + !arguments.from.empty() + !arguments.sort.empty() +
                     !arguments.example.empty();
  if (stated != 1) {
    fail(ExitCode::kUsage, "{} one problem: --cost, --from with --to, --sort or --example",
         stated == 0 ? "give" : "give only");
  }
  if (!arguments.example.empty()) return example(arguments.example);
  if (!arguments.sort.empty()) {
    const at::Tensor values = read_vector(arguments.sort);
    check_cells(values.numel(), values.numel());
    const double* begin = values.const_data_ptr<double>();
    return sort_problem({begin, begin + values.numel()});
  }
  const at::Tensor cost_RC =
      arguments.cost.empty() ? costs_of_points(arguments) : read_matrix(arguments.cost);
  return {.transport = {.cost_RC = cost_RC,
                        .source_R = masses(arguments.source, cost_RC.size(0), "source"),
                        .target_C = masses(arguments.target, cost_RC.size(1), "target")},
          .values = {}};
}

}  // namespace birkhoff
