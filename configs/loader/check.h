// Checks of a configuration's values, and defaults for the values that a user does not set.
#pragma once

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <string>
#include <vector>

#include "configs/loader/source_locations.h"
#include "configs/schema/config.pb.h"
#include "configs/schema/options.pb.h"

namespace birkhoff {

// An interval of the schema's (range) option: "[0, 1)", "(0, inf)".
class Range {
 public:
  explicit Range(const std::string& text);
  bool contains(double value) const;

 private:
  double low_, high_;
  bool low_open_, high_open_;
};

// The field of the message that has a bool option of configs/schema/options.proto; nullptr: none.
template <typename Option>
const google::protobuf::FieldDescriptor* field_with(const google::protobuf::Message& message,
                                                    const Option& option) {
  const google::protobuf::Descriptor& type = *message.GetDescriptor();
  for (int i = 0; i < type.field_count(); ++i) {
    if (type.field(i)->options().GetExtension(option)) return type.field(i);
  }
  return nullptr;
}

// The block length of a mechanism's message, in tokens. Error(kInternal) if none of its fields is a
// (block_length).
int block_length_of(const google::protobuf::Message& mechanism);

// Checks each value by itself: numbers are in their ranges, strings are text. Here and in
// check_consistency(), Error(kConfig) names the source location, the field, its value and what is
// allowed.
void check_values(const google::protobuf::Message& config, const SourceLocations& places);

// Sets every unset field: numbers, strings and enums to their defaults, messages recursively (in a
// oneof only the chosen one; by default optimizer: adamw, mechanism: dense, for point sets the
// set_transformer, and for translation model.encoder). Replaces zeros that mean "derived" with the
// derived value if the config by itself determines it. Resolving twice changes nothing. Expects
// numbers in their ranges.
void resolve(configs::Config& config);
// The number of the longest samples that fit in train.batch_tokens; resolve() makes it
// train.global_batch.
std::int64_t longest_samples(const configs::Config& config);
// Attention of one group of heads with the mechanism that resolve() takes where none is chosen.
configs::Attention default_attention(int heads);

// Checks the values of a resolved config against each other; check_train() those of config.train()
// and of what it carries from step to step, check_classification() those of a task with classes,
// check_point_sets() those that a task.point_sets restricts, check_adaptive_softmax() those that
// model.adaptive_softmax restricts.
void check_consistency(const configs::Config& config, const SourceLocations& places);
void check_train(const configs::Config& config, const SourceLocations& places);
void check_classification(const configs::Config& config, const SourceLocations& places);
void check_point_sets(const configs::Config& config, const SourceLocations& places);
void check_adaptive_softmax(const configs::Config& config, const SourceLocations& places);

// The tokens of the longest target of a resolved config, in the stack that predicts: those of a
// task of pairs, else data.sequence_length.
int target_length(const configs::Config& config);
// Sets task.translation.target_length. The task must be translation.
void set_target_length(configs::Config& config, int length);
// The tokens of a sample without padding, of a task of pairs those of its source and target, and of
// a classifier with two towers those of both texts.
std::int64_t tokens_per_sample(const configs::Config& config);
// The tokens before a sequence that a model with memory (model.memory) sees in evaluation; 0: none.
int evaluation_memory(const configs::Model& model);
// The tokens of a sequence in evaluation, of a language model.
int evaluation_sequence_length(const configs::Config& config);
// True if tokens see only earlier tokens, in the stack that predicts.
bool is_causal(const configs::Task& task);
// Whether the samples of the task are images.
bool reads_images(const configs::Task& task);
// Whether the task's network normalizes over the global batch (batch_norm): its training passes are
// then collective over the data-parallel ranks.
bool has_batch_norm(const configs::Task& task);
// Whether the task's network chooses points by computed values.
bool chooses_points(const configs::Task& task);
// Whether the task classifies pairs of texts, each of which the model reads by itself.
bool has_two_towers(const configs::Task& task);
// Names what evaluations in training measure: their losses compare only where it is the same.
std::string evaluated_data(const configs::Config& config);
// Number of classes that the task predicts; 0 if none.
int class_count(const configs::Task& task);
// Weights of these classes in the training loss; empty: all are 1.
std::vector<float> class_weights(const configs::Task& task);

// A value that differs from its default although the other fields leave it without effect.
struct UselessValue {
  std::string path, what;
};
// The useless values of a resolved config, by the (needs) of its fields.
std::vector<UselessValue> useless_values(const configs::Config& config);

// The condition under which a field has no effect, in words: "unless shape is cosine", "if
// causal_balance is none or uniform", "in encoders".
std::string condition_text(const configs::Condition& condition);

// Refuses evaluation-only values (evaluation_only) and fields (measurement) in a config to train
// from, or in a message at `path` inside it.
void check_trains(const google::protobuf::Message& message, const SourceLocations& places,
                  const std::string& path = "");

}  // namespace birkhoff
