#include <fmt/format.h>
#include <google/protobuf/descriptor.h>

#include <algorithm>
#include <memory>

#include "configs/loader/check.h"
#include "configs/loader/message_text.h"
#include "configs/loader/source_locations.h"

namespace birkhoff {
namespace {

using configs::Condition;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

// The value of a field as a Condition names it.
std::string named_value(const Message& message, const FieldDescriptor& field) {
  if (field.cpp_type() == FieldDescriptor::CPPTYPE_STRING) {
    return message.GetReflection()->GetString(message, &field);
  }
  if (field.message_type() == nullptr) return value_text(message, &field);
  const FieldDescriptor* chosen =
      chosen_member(message.GetReflection()->GetMessage(message, &field));
  return chosen == nullptr ? "" : chosen->name();
}

bool allows(const Condition& condition, const std::string& value) {
  const auto has = [&](const auto& values) {
    return std::find(values.begin(), values.end(), value) != values.end();
  };
  return (condition.is().empty() || has(condition.is())) && !has(condition.is_not());
}

std::string default_text(const Message& message, const FieldDescriptor& field) {
  const std::unique_ptr<Message> fresh(message.New());
  return value_text(*fresh, &field);
}

class Search {
 public:
  explicit Search(const configs::Config& config) : config_(config) {}

  std::vector<UselessValue> run() {
    visit(config_, "", is_causal(config_.task()));
    return std::move(found_);
  }

 private:
  void visit(const Message& message, const std::string& path, bool causal) {
    if (message.GetDescriptor() == configs::Encoder::descriptor()) causal = false;
    for (const SetValue& value : set_values(message, path)) {
      if (value.message != nullptr) {
        visit(*value.message, value.path, causal);
      } else if (value.index < 0) {
        visit_value(message, *value.field, value.path, causal);
      }
    }
  }

  void visit_value(const Message& message, const FieldDescriptor& field, const std::string& path,
                   bool causal) {
    if (is_default(message, field, causal)) return;
    const Condition* unmet = unmet_condition(message, field, causal);
    if (unmet == nullptr) return;
    std::string what =
        fmt::format("{} has no effect {}; leave it at its default, {}", value_text(message, &field),
                    condition_text(*unmet), default_text(message, field));
    if (!unmet->causal()) what += fmt::format(", or change {}", unmet->field());
    found_.push_back({path, what});
  }

  // True if the field has the value that resolve() gives it when it is unset.
  bool is_default(const Message& message, const FieldDescriptor& field, bool causal) const {
    if (value_text(message, &field) == default_text(message, field)) return true;
    return field.options().GetExtension(configs::blocks_of_sequence) &&
           message.GetReflection()->GetInt32(message, &field) ==
               (causal ? target_length(config_) : config_.data().sequence_length()) /
                   block_length_of(message);
  }

  // The first of the field's conditions that does not hold; nullptr: it has an effect.
  const Condition* unmet_condition(const Message& message, const FieldDescriptor& field,
                                   bool causal) const {
    const auto& options = field.options();
    for (int i = 0; i < options.ExtensionSize(configs::needs); ++i) {
      const Condition& condition = options.GetExtension(configs::needs, i);
      if (condition.causal()) {
        if (!causal) return &condition;
        continue;
      }
      const FieldDescriptor* near = message.GetDescriptor()->FindFieldByName(condition.field());
      const Message& holder = near == nullptr ? config_ : message;
      const FieldDescriptor* other = holder.GetDescriptor()->FindFieldByName(condition.field());
      require(other != nullptr, "a (needs) of the schema names no field");
      if (unmet_condition(holder, *other, causal) != nullptr) continue;
      if (!allows(condition, named_value(holder, *other))) return &condition;
    }
    return nullptr;
  }

  const configs::Config& config_;
  std::vector<UselessValue> found_;
};

}  // namespace

std::vector<UselessValue> useless_values(const configs::Config& config) {
  return Search(config).run();
}

std::string condition_text(const Condition& condition) {
  if (condition.causal()) return "in encoders";
  const bool some = condition.is_size() > 0;
  const std::string values =
      fmt::format("{}", fmt::join(some ? condition.is() : condition.is_not(), " or "));
  return fmt::format("{} {} is {}", some ? "unless" : "if", condition.field(),
                     values.empty() ? "empty" : values);
}

}  // namespace birkhoff
