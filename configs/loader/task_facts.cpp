// What a resolved configuration says about its task: declared in check.h.
#include <fmt/format.h>
#include <google/protobuf/reflection.h>

#include "configs/loader/check.h"
#include "configs/loader/message_text.h"

namespace birkhoff {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

namespace {

// The message of the chosen task; nullptr: none is chosen.
const Message* chosen(const configs::Task& task) {
  const FieldDescriptor* field = chosen_member(task);
  return field == nullptr ? nullptr : &task.GetReflection()->GetMessage(task, field);
}

}  // namespace

int target_length(const configs::Config& config) {
  return config.task().has_translation() ? config.task().translation().target_length()
                                         : config.data().sequence_length();
}

void set_target_length(configs::Config& config, int length) {
  config.mutable_task()->mutable_translation()->set_target_length(length);
}

std::int64_t tokens_per_sample(const configs::Config& config) {
  return std::int64_t{config.data().sequence_length()} * (has_two_towers(config.task()) ? 2 : 1) +
         (config.task().has_translation() ? target_length(config) : 0);
}

int evaluation_memory(const configs::Model& model) {
  const configs::Memory& memory = model.memory();
  return memory.evaluation_length() > 0 ? memory.evaluation_length() : memory.length();
}

int evaluation_sequence_length(const configs::Config& config) {
  const int length = config.model().memory().evaluation_sequence_length();
  return length > 0 ? length : config.data().sequence_length();
}

bool is_causal(const configs::Task& task) {
  const Message* message = chosen(task);
  return message != nullptr &&
         message->GetDescriptor()->options().GetExtension(configs::causal_task);
}

bool reads_images(const configs::Task& task) {
  const Message* message = chosen(task);
  return message != nullptr && message->GetDescriptor()->FindFieldByName("image") != nullptr;
}

bool has_batch_norm(const configs::Task& task) {
  const FieldDescriptor* network =
      task.has_point_sets() ? chosen_member(task.point_sets()) : nullptr;
  return network != nullptr && network->message_type()->options().GetExtension(configs::batch_norm);
}

bool chooses_points(const configs::Task& task) {
  return task.point_sets().has_point_cloud_transformer();
}

bool has_two_towers(const configs::Task& task) {
  const auto& classification = task.classification();
  return !classification.second_stream().empty() &&
         classification.pair_model() == configs::Classification::two_towers;
}

std::string evaluated_data(const configs::Config& config) {
  const configs::Evaluate& what = config.evaluate();
  std::string text = fmt::format("split {}", what.split());
  if (what.sequences() > 0) text += fmt::format(", {} sequences", what.sequences());
  if (what.stride() > 0) text += fmt::format(", stride {}", what.stride());
  if (config.model().memory().length() > 0) text += fmt::format(", {} parts", what.micro_batch());
  return text;
}

int class_count(const configs::Task& task) {
  const Message* message = chosen(task);
  const FieldDescriptor* field =
      message == nullptr ? nullptr : field_with(*message, configs::class_count);
  return field == nullptr ? 0 : message->GetReflection()->GetInt32(*message, field);
}

std::vector<float> class_weights(const configs::Task& task) {
  const Message* message = chosen(task);
  const FieldDescriptor* field =
      message == nullptr ? nullptr : message->GetDescriptor()->FindFieldByName("class_weight");
  if (field == nullptr) return {};
  const auto weights = message->GetReflection()->GetRepeatedFieldRef<float>(*message, field);
  return {weights.begin(), weights.end()};
}

}  // namespace birkhoff
