#include "launcher/commands/class_report.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "cluster/base/error.h"
#include "launcher/measure/report.h"
#include "runtime/reporting/display_text.h"

namespace birkhoff {
namespace {

constexpr std::int64_t kMaxShown = 20;  // classes in a table that fits a terminal

const std::string& name_of(std::int64_t k, const std::vector<std::string>& names) {
  require(k < std::ssize(names), "each class of a model has a name");
  return names[static_cast<std::size_t>(k)];
}

}  // namespace

std::string majority_text(const ConfusionMatrix& confusion, const std::vector<std::string>& names) {
  return fmt::format("majority class {} {:.3g} %",
                     display_text(name_of(confusion.majority(), names)),
                     100 * confusion.majority_share());
}

std::string class_table(const ConfusionMatrix& confusion, const std::vector<std::string>& names) {
  const std::int64_t classes = confusion.classes();
  if (classes > kMaxShown) return fmt::format("scores of the {} classes: --json\n", classes);
  std::vector<std::string> head = {"class", "samples", "F1"};
  for (std::int64_t k = 0; k < classes; ++k)
    head.push_back("predicted " + display_text(name_of(k, names)));
  std::string text = table_head(head);
  for (std::int64_t k = 0; k < classes; ++k) {
    const std::optional<double> f1 = confusion.f1(k);
    std::vector<std::string> row = {display_text(name_of(k, names)),
                                    std::to_string(confusion.labels(k)),
                                    f1 ? fmt::format("{:.4f}", *f1) : "-"};
    for (std::int64_t j = 0; j < classes; ++j) row.push_back(std::to_string(confusion.pairs(k, j)));
    text += table_row(row);
  }
  return text;
}

void add_classes(const ConfusionMatrix& confusion, const std::vector<std::string>& names,
                 nlohmann::ordered_json& object) {
  object["majority_class"] = name_of(confusion.majority(), names);
  object["majority_share"] = confusion.majority_share();
  nlohmann::ordered_json classes = nlohmann::ordered_json::array();
  nlohmann::ordered_json pairs = nlohmann::ordered_json::array();
  for (std::int64_t k = 0; k < confusion.classes(); ++k) {
    const std::optional<double> f1 = confusion.f1(k);
    classes.push_back({{"name", name_of(k, names)},
                       {"samples", confusion.labels(k)},
                       {"predictions", confusion.predictions(k)},
                       {"correct", confusion.correct(k)},
                       {"f1", f1 ? nlohmann::ordered_json(*f1) : nlohmann::ordered_json()}});
    if (!confusion.has_pairs()) continue;
    nlohmann::ordered_json row = nlohmann::ordered_json::array();
    for (std::int64_t j = 0; j < confusion.classes(); ++j) row.push_back(confusion.pairs(k, j));
    pairs.push_back(std::move(row));
  }
  object["classes"] = std::move(classes);
  if (confusion.has_pairs()) object["confusion"] = std::move(pairs);
}

}  // namespace birkhoff
