#include "configs/loader/summary.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <google/protobuf/descriptor.h>

#include <algorithm>
#include <map>
#include <memory>

#include "cluster/base/text/plural.h"
#include "configs/loader/message_text.h"
#include "configs/loader/source_locations.h"

namespace birkhoff {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

// Clears fields that have their default value, and messages that become empty.
void clear_defaults(Message& message) {
  const auto& reflection = *message.GetReflection();
  const std::unique_ptr<Message> fresh(message.New());
  for (const FieldDescriptor* field : set_fields(message)) {
    if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      Message& below = *reflection.MutableMessage(&message, field);
      clear_defaults(below);
      if (below.ByteSizeLong() == 0) reflection.ClearField(&message, field);
    } else if (value_text(message, field) == value_text(*fresh, field)) {
      reflection.ClearField(&message, field);
    }
  }
}

// The fields that differ from their defaults.
std::string changed_fields(const Message& message) {
  const std::unique_ptr<Message> rest(message.New());
  rest->CopyFrom(message);
  clear_defaults(*rest);
  return rest->ShortDebugString();
}

// The chosen mechanism and the other options of its head group, as far as they differ from their
// defaults.
std::string mechanism_text(const configs::HeadGroup& group) {
  const configs::Mechanism& mechanism = group.mechanism();
  const FieldDescriptor* kind = chosen_member(mechanism);
  const Message& chosen = mechanism.GetReflection()->GetMessage(mechanism, kind);
  std::string text = kind->name();
  if (const std::string fields = changed_fields(chosen); !fields.empty()) {
    text += fmt::format(" {{ {} }}", fields);
  }
  configs::Mechanism terms = mechanism;
  terms.clear_kind();
  configs::HeadGroup rest = group;
  rest.clear_heads();
  rest.clear_mechanism();
  for (const std::string& fields : {changed_fields(terms), changed_fields(rest)}) {
    if (!fields.empty()) text += " " + fields;
  }
  return text;
}

std::string groups_text(const configs::Attention& attention) {
  if (attention.group_size() == 1) return mechanism_text(attention.group(0));
  std::string text;
  for (const configs::HeadGroup& group : attention.group()) {
    text += fmt::format("{}{} {} {}", text.empty() ? "" : ", ", group.heads(),
                        group.heads() == 1 ? "head" : "heads", mechanism_text(group));
  }
  return text;
}

// The values of all configs, keyed by their path in the schema: indices of fields and of list
// entries.
using Place = std::vector<int>;
using FieldTable = std::map<Place, DifferingField>;

// Adds the values of a message at `path` and `at` in one of `num_configs` configs.
void add_values(const Message& message, std::size_t config, std::size_t num_configs,
                const std::string& path, const Place& at, FieldTable& table) {
  for (const SetValue& value : set_values(message, path)) {
    Place place = at;
    place.push_back(value.field->index());
    if (value.index >= 0) place.push_back(value.index);
    if (value.message != nullptr) {
      add_values(*value.message, config, num_configs, value.path, place, table);
      continue;
    }
    DifferingField& row = table[place];
    row.path = value.path;
    row.texts.resize(num_configs, "-");
    row.texts[config] = value_text(message, value.field, value.index);
  }
}

}  // namespace

std::string attention_text(const configs::Model& model) {
  const auto layers_text =
      [](const google::protobuf::RepeatedPtrField<configs::Attention>& attentions) {
        std::string text;
        for (const configs::Attention& attention : attentions) {
          text += (text.empty() ? "" : "; ") + groups_text(attention);
        }
        return attentions.size() > 1 ? "layers in turn: " + text : text;
      };
  if (!model.has_encoder()) return layers_text(model.attention());
  return fmt::format("encoder: {} | decoder: {} | cross-attention: {}",
                     layers_text(model.encoder().attention()), layers_text(model.attention()),
                     layers_text(model.encoder().cross_attention()));
}

std::string layers_text(const configs::Model& model) {
  std::string text =
      fmt::format("{}, {}, {}", counted(model.layers(), "layer"),
                  counted(model.channels(), "channel"), counted(model.heads(), "head"));
  if (model.head_channels() > 0) text += fmt::format(" of {}", model.head_channels());
  if (model.norm() == configs::Model::post) text += ", post-norm";
  if (model.attention_only()) text += ", attention only";
  return text;
}

std::string optimization_text(const configs::Train& train) {
  const configs::Optimizer& optimizer = train.optimizer();
  const FieldDescriptor* kind = chosen_member(optimizer);
  std::string text = kind == nullptr ? "adamw" : kind->name();
  if (kind != nullptr) {
    const std::string fields =
        changed_fields(optimizer.GetReflection()->GetMessage(optimizer, kind));
    if (!fields.empty()) text += fmt::format(" {{ {} }}", fields);
  }
  const configs::Schedule& schedule = train.schedule();
  text += ", " + configs::Schedule::Shape_Name(schedule.shape());
  if (schedule.shape() == configs::Schedule::step_decay) {
    text += fmt::format(" at epochs {}", fmt::join(schedule.decay_epoch(), ", "));
  }
  return text;
}

std::vector<DifferingField> differing_fields(const std::vector<configs::Config>& configs) {
  FieldTable table;
  for (std::size_t i = 0; i < configs.size(); ++i) {
    add_values(configs[i], i, configs.size(), "", {}, table);
  }
  std::vector<DifferingField> result;
  for (const auto& [place, field] : table) {
    const auto differs = [&texts = field.texts](const auto& text) { return text != texts[0]; };
    if (std::ranges::any_of(field.texts, differs)) result.push_back(field);
  }
  return result;
}

}  // namespace birkhoff
