#include "configs/loader/summary.h"

#include <fmt/format.h>
#include <google/protobuf/descriptor.h>

#include <map>
#include <memory>

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
  const auto& reflection = *mechanism.GetReflection();
  const FieldDescriptor* kind =
      reflection.GetOneofFieldDescriptor(mechanism, mechanism.GetDescriptor()->oneof_decl(0));
  const Message& chosen = reflection.GetMessage(mechanism, kind);
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

// Values, keyed by their path in the schema: indices of fields and of list entries.
class FieldTable {
 public:
  explicit FieldTable(std::size_t num_configs) : num_configs_(num_configs) {}

  void add(const Message& message, std::size_t config) { add(message, config, "", {}); }

  std::vector<DifferingField> differing() const {
    std::vector<DifferingField> result;
    for (const auto& [place, field] : fields_) {
      for (const std::string& text : field.texts) {
        if (text == field.texts[0]) continue;
        result.push_back(field);
        break;
      }
    }
    return result;
  }

 private:
  using Place = std::vector<int>;

  void add(const Message& message, std::size_t config, const std::string& path, const Place& at) {
    for (const SetValue& value : set_values(message, path)) {
      Place place = at;
      place.push_back(value.field->index());
      if (value.index >= 0) place.push_back(value.index);
      if (value.message != nullptr) {
        add(*value.message, config, value.path, place);
        continue;
      }
      DifferingField& row = fields_[place];
      row.path = value.path;
      row.texts.resize(num_configs_, "-");
      row.texts[config] = value_text(message, value.field, value.index);
    }
  }

  const std::size_t num_configs_;
  std::map<Place, DifferingField> fields_;
};

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

std::vector<DifferingField> differing_fields(const std::vector<configs::Config>& configs) {
  FieldTable table(configs.size());
  for (std::size_t i = 0; i < configs.size(); ++i) table.add(configs[i], i);
  return table.differing();
}

}  // namespace birkhoff
