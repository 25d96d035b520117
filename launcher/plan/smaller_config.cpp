#include "launcher/plan/smaller_config.h"

#include <google/protobuf/message.h>

#include <algorithm>
#include <numeric>

#include "configs/loader/check.h"
#include "configs/loader/message_text.h"
#include "configs/schema/options.pb.h"

namespace birkhoff {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

// Calls visit(message, field, value) for each int32 of a message and of those inside it.
template <typename Visit>
void visit_integers(Message& message, const Visit& visit) {
  const auto& reflection = *message.GetReflection();
  for (const FieldDescriptor* field : set_fields(message)) {
    const bool is_integer = field->cpp_type() == FieldDescriptor::CPPTYPE_INT32;
    if (field->message_type() == nullptr) {
      if (is_integer && !field->is_repeated())
        visit(message, *field, reflection.GetInt32(message, field));
    } else if (field->is_repeated()) {
      for (int i = 0; i < reflection.FieldSize(message, field); ++i) {
        visit_integers(*reflection.MutableRepeatedMessage(&message, field, i), visit);
      }
    } else {
      visit_integers(*reflection.MutableMessage(&message, field), visit);
    }
  }
}

// In tokens.
std::int64_t unit_of_reach(const Message& message) {
  return field_with(message, configs::block_length) != nullptr ? block_length_of(message) : 1;
}

// Fields with (parts_of_sequence) scale with the length.
template <typename Attentions>
void shorten(Attentions& attentions, std::int64_t full, std::int64_t length) {
  for (configs::Attention& each : attentions) {
    visit_integers(each, [&](Message& message, const FieldDescriptor& field, std::int64_t value) {
      if (!field.options().GetExtension(configs::parts_of_sequence)) return;
      message.GetReflection()->SetInt32(&message, &field,
                                        static_cast<int>((value * length + full - 1) / full));
    });
  }
}

}  // namespace

std::int64_t trial_length(const configs::Config& config) {
  const std::int64_t full = config.data().sequence_length();
  std::int64_t unit = 4;     // a point cloud transformer halves its sets twice
  std::int64_t least = 256;  // products of fewer rows may take another algorithm
  const auto hold_two = [&](std::int64_t tokens) { least = std::max(least, 2 * tokens); };
  const auto consider = [&](const Message& message, const FieldDescriptor& field,
                            std::int64_t value) {
    if (value == 0) return;
    if (field.options().GetExtension(configs::block_length)) unit = std::lcm(unit, value);
    if (field.options().GetExtension(configs::parts_of_sequence)) hold_two(full / value);
    if (field.options().GetExtension(configs::reach)) hold_two(value * unit_of_reach(message));
  };
  configs::Model model = config.model();
  configs::Task task = config.task();
  visit_integers(model, consider);
  visit_integers(task, consider);
  hold_two(unit);
  least = (least + unit - 1) / unit * unit;
  return 2 * least < full && target_length(config) == full ? least : full;
}

configs::Config smaller_config(const configs::Config& config, std::int64_t sequences,
                               std::int64_t length) {
  const std::int64_t full = config.data().sequence_length(), targets = target_length(config);
  configs::Config part = config;
  part.set_device(configs::Config::cpu);
  part.mutable_data()->set_sequence_length(static_cast<int>(length));
  configs::Model& model = *part.mutable_model();
  shorten(*model.mutable_attention(), full, length);
  if (model.has_encoder()) {
    if (targets == full) set_target_length(part, static_cast<int>(length));
    shorten(*model.mutable_encoder()->mutable_attention(), full, length);
    shorten(*model.mutable_encoder()->mutable_cross_attention(), full, length);
  }
  configs::Train& train = *part.mutable_train();
  train.set_global_batch(static_cast<int>(sequences));
  train.set_micro_batch(0);
  train.set_cuda_graph(false);
  train.mutable_invariant()->set_shards(0);
  if (train.precision() == configs::Train::fp16) train.set_precision(configs::Train::bf16);
  return part;
}

}  // namespace birkhoff
