#include "configs/loader/check.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/text_format.h>

#include <vector>

#include "configs/loader/message_text.h"

namespace birkhoff {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;
using google::protobuf::TextFormat;

void set_defaults(Message& message) {
  const Reflection& reflection = *message.GetReflection();
  for (int i = 0; i < message.GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor* field = message.GetDescriptor()->field(i);
    const bool is_message = field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE;
    if (field->is_repeated()) {
      for (int j = 0; is_message && j < reflection.FieldSize(message, field); ++j) {
        set_defaults(*reflection.MutableRepeatedMessage(&message, field, j));
      }
      continue;
    }
    const bool unset = !reflection.HasField(message, field) &&
                       !field->options().GetExtension(configs::replaced) &&
                       field->real_containing_oneof() == nullptr;
    if (is_message && (unset || reflection.HasField(message, field))) {
      set_defaults(*reflection.MutableMessage(&message, field));
    } else if (unset) {
      // An unset field prints its default.
      const bool parsed =
          TextFormat::ParseFieldValueFromString(value_text(message, field), field, &message);
      require(parsed, "a default of the schema can be parsed");
    }
  }
}

using Attentions = google::protobuf::RepeatedPtrField<configs::Attention>;

// A list of a model's attention, and the tokens of the longest sequence that it reads.
struct AttentionList {
  Attentions* attentions;
  int length;
};

// All of them.
std::vector<AttentionList> attention_lists(configs::Config& config) {
  configs::Model& model = *config.mutable_model();
  const int length = config.data().sequence_length();
  std::vector<AttentionList> lists{{model.mutable_attention(), target_length(config)}};
  if (model.has_encoder()) {
    lists.push_back({model.mutable_encoder()->mutable_attention(), length});
    lists.push_back({model.mutable_encoder()->mutable_cross_attention(), length});
  }
  return lists;
}

void choose_mechanism(configs::HeadGroup& group) {
  auto& mechanism = *group.mutable_mechanism();
  if (mechanism.kind_case() == configs::Mechanism::KIND_NOT_SET) mechanism.mutable_dense();
}

void choose_unchosen(configs::Config& config) {
  auto& optimizer = *config.mutable_train()->mutable_optimizer();
  if (optimizer.kind_case() == configs::Optimizer::KIND_NOT_SET) optimizer.mutable_adamw();
  auto& task = *config.mutable_task();
  if (task.has_point_sets() &&
      task.point_sets().network_case() == configs::PointSets::NETWORK_NOT_SET) {
    task.mutable_point_sets()->mutable_set_transformer();
  }
  auto& model = *config.mutable_model();
  if (task.has_translation()) model.mutable_encoder();
  for (const AttentionList& list : attention_lists(config)) {
    if (list.attentions->empty()) list.attentions->Add();
    for (auto& attention : *list.attentions) {
      if (attention.group().empty()) attention.add_group();
      for (auto& group : *attention.mutable_group()) {
        choose_mechanism(group);
      }
    }
  }
}

// If exactly one group has no number of heads, it gets the remaining heads.
void share_heads(configs::Attention& attention, int heads) {
  configs::HeadGroup* rest = nullptr;
  int num_without = 0;
  std::int64_t left = heads;
  for (auto& group : *attention.mutable_group()) {
    left -= group.heads();
    if (group.heads() == 0) {
      rest = &group;
      num_without += 1;
    }
  }
  if (num_without == 1 && left > 0) rest->set_heads(static_cast<int>(left));
}

// Replaces max_blocks = 0 in a mechanism and in the mechanisms inside it.
void derive_max_blocks(Message& message, int sequence_length) {
  const auto& reflection = *message.GetReflection();
  for (const FieldDescriptor* field : set_fields(message)) {
    if (field->message_type() != nullptr) {
      derive_max_blocks(*reflection.MutableMessage(&message, field), sequence_length);
    } else if (field->options().GetExtension(configs::blocks_of_sequence) &&
               reflection.GetInt32(message, field) == 0) {
      reflection.SetInt32(&message, field, sequence_length / block_length_of(message));
    }
  }
}

}  // namespace

configs::Attention default_attention(int heads) {
  configs::Attention attention;
  configs::HeadGroup& group = *attention.add_group();
  group.set_heads(heads);
  choose_mechanism(group);
  return attention;
}

void resolve(configs::Config& config) {
  config.clear_include();
  choose_unchosen(config);
  set_defaults(config);
  auto& model = *config.mutable_model();
  if (model.feed_forward() == 0 && !model.attention_only()) {
    model.set_feed_forward(4 * model.channels());
  }
  if (model.has_encoder() && model.encoder().layers() == 0) {
    model.mutable_encoder()->set_layers(model.layers());
  }
  if (config.task().has_translation() && target_length(config) == 0) {
    config.mutable_task()->mutable_translation()->set_target_length(
        config.data().sequence_length());
  }
  for (const AttentionList& list : attention_lists(config)) {
    for (auto& attention : *list.attentions) {
      share_heads(attention, model.heads());
      for (auto& group : *attention.mutable_group()) {
        derive_max_blocks(*group.mutable_mechanism(), list.length);
      }
    }
  }
}

}  // namespace birkhoff
