#include "runtime/reporting/figure_sums.h"

#include <algorithm>
#include <limits>

namespace birkhoff {

FigureSums::FigureSums(std::vector<Figure> figures) : figures_(std::move(figures)) {
  for (const Figure& figure : figures_) {
    for (const std::string& name : {figure.sum, figure.per}) {
      if (!name.empty() && column(name) < 0) names_.push_back(name);
    }
  }
}

std::int64_t FigureSums::column(std::string_view name) const {
  const auto found = std::ranges::find(names_, name);
  return found == names_.end() ? -1 : found - names_.begin();
}

bool FigureSums::complete(const NamedSums& sums) const {
  return std::ranges::all_of(names_, [&](const std::string& name) {
    return std::ranges::count(sums, name, &NamedSums::value_type::first) == 1;
  });
}

FigureValues FigureSums::values(const double* columns, double count) const {
  FigureValues values;
  for (const Figure& figure : figures_) {
    const double per = figure.per.empty() ? count : columns[column(figure.per)];
    values.emplace_back(figure.sum, per == 0 ? std::numeric_limits<double>::quiet_NaN()
                                             : columns[column(figure.sum)] / per);
  }
  return values;
}

}  // namespace birkhoff
