#include "configs/loader/check.h"

#include <fmt/format.h>

#include <cmath>
#include <cstdlib>
#include <string>

#include "cluster/base/text/number_text.h"
#include "cluster/base/text/plural.h"
#include "cluster/base/text/utf8.h"
#include "configs/loader/message_text.h"

namespace birkhoff {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

void check_number(const Message& message, const SetValue& number_of,
                  const SourceLocations& places) {
  const FieldDescriptor& field = *number_of.field;
  const auto check = [&](auto value) {
    const auto number = static_cast<double>(value);
    const bool fits = !field.options().GetExtension(configs::odd) || std::fmod(number, 2) != 0;
    if (fits && Range(field.options().GetExtension(configs::range)).contains(number)) return;
    config_error(places, number_of.path, "must be in {}, is {}", range_text(field), value);
  };
  const auto& reflection = *message.GetReflection();
  if (is_integer(field)) {
    check(parse_number<std::int64_t>(value_text(message, &field, number_of.index)).value());
  } else if (field.is_repeated()) {
    check(reflection.GetRepeatedFloat(message, &field, number_of.index));
  } else if (field.cpp_type() == FieldDescriptor::CPPTYPE_FLOAT) {
    check(reflection.GetFloat(message, &field));
  } else {
    check(reflection.GetDouble(message, &field));
  }
}

void check_string(const std::string& value, const std::string& path,
                  const SourceLocations& places) {
  if (find_invalid_utf8(value) != std::string::npos) config_error(places, path, "is not UTF-8");
  for (const char c : value) {
    if (static_cast<unsigned char>(c) < 0x20) {
      config_error(places, path, "{} contains a control character", quoted(value));
    }
  }
}

void check_message(const Message& message, const std::string& path, const SourceLocations& places) {
  const auto& reflection = *message.GetReflection();
  for (const SetValue& value : set_values(message, path)) {
    const FieldDescriptor* field = value.field;
    if (value.message != nullptr) {
      check_message(*value.message, value.path, places);
    } else if (field->cpp_type() == FieldDescriptor::CPPTYPE_STRING) {
      check_string(value.index < 0 ? reflection.GetString(message, field)
                                   : reflection.GetRepeatedString(message, field, value.index),
                   value.path, places);
    } else if (field->options().HasExtension(configs::range)) {  // all numbers but seeds
      check_number(message, value, places);
    }
  }
}

// Checks one config. This is a class so that all checks share the config and the source locations.
class ConsistencyCheck {
 public:
  ConsistencyCheck(const configs::Config& config, const SourceLocations& places)
      : config_(config), places_(places) {}

  void run() const {
    check_task();
    check_model();
    check_classification(config_, places_);
    if (config_.task().has_point_sets()) check_point_sets(config_, places_);
    check_adaptive_softmax(config_, places_);
    check_train(config_, places_);
    check_mesh();
    const std::string& split = config_.evaluate().split();
    if (split != "valid" && split != "test") {
      config_error(places_, "evaluate.split", "must be \"valid\" or \"test\", is {}",
                   quoted(split));
    }
    if (config_.evaluate().patience() > 0 && config_.evaluate().every() == 0) {
      config_error(places_, "evaluate.patience",
                   "{} has no effect with evaluate.every 0, which evaluates only at the end; set "
                   "the number of steps between evaluations, or leave it out",
                   config_.evaluate().patience());
    }
    if (config_.evaluate().stride() > config_.data().sequence_length()) {
      config_error(
          places_, "evaluate.stride",
          "{} is above data.sequence_length {}, so tokens between windows would not count; "
          "use at most that",
          config_.evaluate().stride(), config_.data().sequence_length());
    }
  }

 private:
  void check_task() const {
    if (config_.task().kind_case() != configs::Task::KIND_NOT_SET) return;
    config_error(
        places_, "task",
        "no task is chosen; choose what to learn, for instance task {{ language_model {{}} }} "
        "(or {})",
        fmt::join(oneof_names(*configs::Task::descriptor()->oneof_decl(0)), ", "));
  }

  void check_model() const {
    const auto& model = config_.model();
    if (model.head_channels() == 0 && model.channels() % model.heads() != 0) {
      config_error(places_, "model.channels",
                   "{} cannot be split among {}; make model.channels a multiple of model.heads, or "
                   "set model.head_channels",
                   counted(model.channels(), "channel"), counted(model.heads(), "head"));
    }
    if (model.attention_only()) check_attention_only();
    if (model.positions() == configs::Model::sinusoidal && model.channels() % 2 != 0) {
      config_error(places_, "model.channels",
                   "sinusoidal positions need an even number of channels, not {}",
                   model.channels());
    }
    if (model.positions() == configs::Model::relative_sinusoidal &&
        !config_.task().has_language_model()) {
      config_error(places_, "model.positions",
                   "relative_sinusoidal are positions of task.language_model; choose others");
    }
    check_embedding();
    const bool has_targets = config_.task().has_translation();
    check_attentions(
        model.attention(), "model.attention",
        {.causal = is_causal(config_.task()),
         .length = target_length(config_),
         .field = has_targets ? "task.translation.target_length" : "data.sequence_length"});
    if (!model.has_encoder()) return;
    if (!has_targets) {
      config_error(places_, "model.encoder",
                   "only task.translation reads a second sequence; remove model.encoder");
    }
    const Keys of_sources{.causal = false,
                          .length = config_.data().sequence_length(),
                          .field = "data.sequence_length"};
    check_attentions(model.encoder().attention(), "model.encoder.attention", of_sources);
    check_attentions(model.encoder().cross_attention(), "model.encoder.cross_attention",
                     of_sources);
  }

  void check_embedding() const {
    const auto& model = config_.model();
    if (model.positions() == configs::Model::image_axes && !config_.task().has_pixel_model()) {
      config_error(places_, "model.positions",
                   "image_axes are positions of the values of an image, which only "
                   "task.pixel_model reads; choose learned");
    }
    if (!config_.task().has_image_classification()) return;
    const char* const of_tokens =
        "is for embeddings of tokens, and task.image_classification reads patches; leave it out";
    if (model.embedding_channels() > 0) {
      config_error(places_, "model.embedding_channels", "{}", of_tokens);
    }
    if (model.scale_embeddings()) config_error(places_, "model.scale_embeddings", "{}", of_tokens);
  }

  // Fields of the feed-forward sublayers must be unset if there are none.
  void check_attention_only() const {
    const auto& model = config_.model();
    const auto require_unset = [&](bool unset, const char* field, const auto& value) {
      if (unset) return;
      config_error(places_, field,
                   "{} has no effect with model.attention_only, whose layers have no feed-forward "
                   "sublayer; leave one of them out",
                   value);
    };
    require_unset(model.feed_forward() == 0, "model.feed_forward", model.feed_forward());
    require_unset(model.activation() == configs::Model::gelu, "model.activation",
                  configs::Model::Activation_Name(model.activation()));
    require_unset(model.dropout().activation() == 0, "model.dropout.activation",
                  model.dropout().activation());
  }

  // The sequences whose keys an attention reads: the number of their tokens, and the field that
  // determines it.
  struct Keys {
    bool causal;
    int length;
    const char* field;
  };

  void check_attentions(const google::protobuf::RepeatedPtrField<configs::Attention>& attentions,
                        const std::string& path, const Keys& keys) const {
    for (int i = 0; i < attentions.size(); ++i) {
      check_attention(attentions[i], fmt::format("{}.{}", path, i), keys);
    }
  }

  void check_attention(const configs::Attention& attention, const std::string& path,
                       const Keys& keys) const {
    std::int64_t sum = 0;
    for (int i = 0; i < attention.group_size(); ++i) {
      const auto& group = attention.group(i);
      const std::string group_path = fmt::format("{}.group.{}", path, i);
      if (group.heads() == 0) {
        config_error(
            places_, group_path + ".heads",
            "no heads are left for this group: the other groups take all {} of model.heads, or "
            "several groups omit heads",
            config_.model().heads());
      }
      if (group.key_heads() > 0 && group.heads() % group.key_heads() != 0) {
        config_error(places_, group_path + ".key_heads", "{} does not divide the group's {}",
                     group.key_heads(), counted(group.heads(), "head"));
      }
      sum += group.heads();
      check_mechanism(group.mechanism(), group_path + ".mechanism", keys);
    }
    if (sum != config_.model().heads()) {
      config_error(places_, path, "its groups have {} together, model.heads is {}",
                   counted(sum, "head"), config_.model().heads());
    }
  }

  // Checks a mechanism and the mechanisms inside it by the options of their fields.
  void check_mechanism(const Message& message, const std::string& path, const Keys& keys) const {
    const auto& reflection = *message.GetReflection();
    const std::string& reason =
        message.GetDescriptor()->options().GetExtension(configs::encoder_only);
    if (keys.causal && !reason.empty()) {
      config_error(places_, path,
                   "is for encoders, not for causal attention, because {}; use another mechanism",
                   reason);
    }
    if (const FieldDescriptor* field = field_with(message, configs::block_length)) {
      const int block = block_length_of(message);
      if (keys.length % block != 0) {
        config_error(places_, join_path(path, field->name()),
                     "{} {} is not a multiple of the block length {}; only whole blocks are "
                     "accepted",
                     keys.field, keys.length, block);
      }
    }
    if (config_.train().cuda_graph()) check_captured(message, path);
    for (const SetValue& value : set_values(message, path)) {
      const FieldDescriptor* field = value.field;
      if (value.message != nullptr) {
        check_mechanism(*value.message, value.path, keys);
      } else if (field->options().GetExtension(configs::blocks_of_sequence)) {
        check_max_blocks(reflection.GetInt32(message, field), block_length_of(message), keys,
                         value.path);
      } else if (field->enum_type() != nullptr && keys.causal) {
        check_causal_blocks(*reflection.GetEnum(message, field), message, keys.length, value.path);
      }
    }
  }

  // A recorded graph keeps the shapes of the step that was recorded, and these lists have as many
  // segments as the batch has documents.
  void check_captured(const Message& mechanism, const std::string& path) const {
    if (!mechanism.GetDescriptor()->options().GetExtension(configs::lists_documents)) return;
    if (!config_.data().restart_at_documents()) return;
    config_error(places_, "train.cuda_graph",
                 "must be false with data.restart_at_documents and {}, whose lists of keys depend "
                 "on how many documents a batch has; leave one of them out",
                 path);
  }

  void check_max_blocks(int max_blocks, int block, const Keys& keys,
                        const std::string& path) const {
    const int num_blocks = keys.length / block;
    if (max_blocks >= num_blocks) return;
    config_error(places_, path,
                 "{} is less than the {} of a sequence ({} {} / block {}); 0 selects that number",
                 max_blocks, counted(num_blocks, "block"), keys.field, keys.length, block);
  }

  void check_causal_blocks(const google::protobuf::EnumValueDescriptor& value,
                           const Message& mechanism, int length, const std::string& path) const {
    if (!value.options().HasExtension(configs::most_causal_blocks)) return;
    const int most = value.options().GetExtension(configs::most_causal_blocks);
    const int num_blocks = length / block_length_of(mechanism);
    if (num_blocks <= most) return;
    config_error(places_, path,
                 "{} supports at most {} blocks, but a sequence has {}; use longer blocks or "
                 "another {}",
                 value.name(), most, num_blocks, path.substr(path.rfind('.') + 1));
  }

  // The chosen member of train.optimizer; a resolved config always has one.
  const FieldDescriptor& optimizer() const { return *chosen_member(config_.train().optimizer()); }

  void check_mesh() const {
    if (config_.mesh().tensor() > 1) check_tensor_axis();
    if (config_.mesh().sequence() != 1) {
      config_error(places_, "mesh.sequence",
                   "sequence parallelism is not supported yet; must be 1, is {}",
                   config_.mesh().sequence());
    }
    if (config_.mesh().zero_inside_nodes() && config_.mesh().ranks_per_node() == 1) {
      config_error(places_, "mesh.zero_inside_nodes",
                   "would slice over one rank with mesh.ranks_per_node 1; set the ranks of a node, "
                   "or leave it out");
    }
    if (config_.mesh().zero_inside_nodes() && config_.train().zero_stage() == 0) {
      config_error(places_, "mesh.zero_inside_nodes",
                   "has no effect with train.zero_stage 0; set a stage, or leave it out");
    }
    if (config_.mesh().ranks_per_node() > 0 && config_.train().invariant().shards() > 0) {
      config_error(places_, "mesh.ranks_per_node",
                   "must be 0 with train.invariant.shards, whose sums have one order on any number "
                   "of ranks; leave one of them out");
    }
    if (config_.mesh().nccl_reductions()) check_nccl_reductions();
  }

  void check_nccl_reductions() const {
    const char* const field = "mesh.nccl_reductions";
    if (config_.device() != configs::Config::cuda) {
      config_error(places_, field, "needs device: cuda; leave it out on CPUs");
    }
    if (config_.train().invariant().shards() > 0) {
      config_error(places_, field,
                   "must be false with train.invariant.shards, whose sums have one order on any "
                   "number of ranks; leave one of them out");
    }
    if (config_.mesh().ranks_per_node() > 0 && !config_.mesh().zero_inside_nodes()) {
      config_error(places_, field,
                   "must be false with mesh.ranks_per_node: NCCL finds out by itself which ranks "
                   "share a node; leave one of them out");
    }
  }

  // Each rank of the tensor axis has as many heads and hidden units as the others.
  void check_tensor_axis() const {
    const auto& model = config_.model();
    const auto& train = config_.train();
    const int ranks = config_.mesh().tensor();
    const auto check_divides = [&](std::int64_t size, const std::string& what) {
      if (size % ranks == 0) return;
      config_error(places_, "mesh.tensor", "{} does not divide {} {}; choose a divisor of it",
                   ranks, what, size);
    };
    check_divides(model.feed_forward(), "model.feed_forward");
    const auto check_heads = [&](const auto& attentions, const std::string& path) {
      for (int i = 0; i < attentions.size(); ++i) {
        for (int g = 0; g < attentions[i].group_size(); ++g) {
          const auto& group = attentions[i].group(g);
          const std::string of_group = fmt::format("{}.{}.group.{}.", path, i, g);
          check_divides(group.heads(), of_group + "heads");
          check_divides(group.key_heads(), of_group + "key_heads");
        }
      }
    };
    check_heads(model.attention(), "model.attention");
    check_heads(model.encoder().attention(), "model.encoder.attention");
    check_heads(model.encoder().cross_attention(), "model.encoder.cross_attention");
    if (!optimizer().message_type()->options().GetExtension(configs::slices)) {
      config_error(places_, "mesh.tensor",
                   "must be 1 with train.optimizer.{}, which needs whole matrices; use "
                   "train.optimizer.adamw or sgd",
                   optimizer().name());
    }
    if (train.precision() == configs::Train::fp16) {
      config_error(places_, "mesh.tensor",
                   "must be 1 with train.precision: fp16, which ranks do not exchange; use bf16");
    }
    if (train.cuda_graph()) {
      config_error(places_, "mesh.tensor",
                   "must be 1 with train.cuda_graph, which records no communication; leave one of "
                   "them out");
    }
  }

  const configs::Config& config_;
  const SourceLocations& places_;
};

}  // namespace

Range::Range(const std::string& text) {
  const std::size_t comma = text.find(',');
  require(comma != std::string::npos && (text.front() == '[' || text.front() == '(') &&
              (text.back() == ']' || text.back() == ')'),
          "a (range) of the schema is not an interval");
  low_open_ = text.front() == '(';
  high_open_ = text.back() == ')';
  low_ = std::strtod(text.c_str() + 1, nullptr);
  high_ = std::strtod(text.c_str() + comma + 1, nullptr);
}

bool Range::contains(double value) const {
  return std::isfinite(value) && (low_open_ ? value > low_ : value >= low_) &&
         (high_open_ ? value < high_ : value <= high_);
}

int block_length_of(const Message& mechanism) {
  const FieldDescriptor* field = field_with(mechanism, configs::block_length);
  require(field != nullptr, "a mechanism with blocks has a (block_length)");
  return mechanism.GetReflection()->GetInt32(mechanism, field);
}

void check_values(const Message& config, const SourceLocations& places) {
  check_message(config, "", places);
}

void check_consistency(const configs::Config& config, const SourceLocations& places) {
  ConsistencyCheck(config, places).run();
}

void check_trains(const Message& message, const SourceLocations& places, const std::string& path) {
  const auto& reflection = *message.GetReflection();
  for (const SetValue& value : set_values(message, path)) {
    const FieldDescriptor* field = value.field;
    if (value.message != nullptr) {
      check_trains(*value.message, places, value.path);
    } else if (field->enum_type() != nullptr) {
      const auto& choice = *reflection.GetEnum(message, field);
      if (!choice.options().GetExtension(configs::evaluation_only)) continue;
      config_error(places, value.path,
                   "{} is only for evaluation; train with another value, then use `birkhoff eval "
                   "RUN --set {}={}`",
                   choice.name(), value.path, choice.name());
    } else if (field->options().GetExtension(configs::measurement) &&
               reflection.GetBool(message, field)) {
      config_error(places, value.path,
                   "is only for evaluation; train without it, then use `birkhoff eval RUN --set "
                   "{}=true`",
                   value.path);
    }
  }
}

}  // namespace birkhoff
