#include "models/describe.h"

#include <fmt/format.h>

namespace birkhoff {
namespace {

// "blocks.<i>.<part>" for the parameters of a layer, else the first component of the name; for
// those of a second stack after "encoder.".
std::string part_of(const std::string& parameter) {
  const std::string stack = parameter.starts_with("encoder.") ? "encoder." : "";
  std::size_t end = parameter.find('.', stack.size());
  if (parameter.starts_with(stack + "blocks.")) {
    end = parameter.find('.', parameter.find('.', end + 1) + 1);
  }
  return parameter.substr(0, end);
}

}  // namespace

std::vector<ModelPart> model_parts(Model& model) {
  std::vector<ModelPart> parts;
  for (const Parameter& parameter : model.parameters().list()) {
    const std::string name = part_of(parameter.name);
    if (parts.empty() || parts.back().name != name) parts.push_back({name, 0});
    parts.back().num_parameters += parameter.value.numel();
  }
  return parts;
}

std::string describe_model(Model& model, std::int64_t sequence_length) {
  std::string text;
  for (const ModelPart& part : model_parts(model)) {
    text += fmt::format("{:<32} {:>14} parameters\n", part.name, part.num_parameters);
  }
  text += fmt::format("{:<32} {:>14} parameters\n", "total", model.parameters().num_elements());
  const double forward = model.forward_flops_per_sequence();
  text += fmt::format("{:<32} {:>14.4g} FLOP forward\n", "a sequence", forward);
  text += fmt::format("{:<32} {:>14.4g} FLOP forward and backward\n", "a token in training",
                      3 * forward / static_cast<double>(sequence_length));
  for (const Statistic& statistic : model.parameters().statistics()) {
    if (!statistic.describe) continue;
    text += fmt::format("\n{}\n{}", statistic.name, statistic.describe(statistic.value));
  }
  return text;
}

}  // namespace birkhoff
