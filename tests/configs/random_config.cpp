#include "random_config.h"

#include <fmt/format.h>
#include <google/protobuf/message.h>

#include <algorithm>
#include <cctype>
#include <limits>
#include <memory>
#include <stdexcept>
#include <vector>

#include "configs/loader/check.h"
#include "configs/loader/message_text.h"
#include "configs/schema/options.pb.h"

namespace birkhoff {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

void RandomConfig::fill(Message& message, bool hostile) {
  const auto& reflection = *message.GetReflection();
  for (int i = 0; i < message.GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor* field = message.GetDescriptor()->field(i);
    // These two name files.
    if (field->name() == "include" || field->name() == "warm_start" || one_in(3)) continue;
    if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      if (field->real_containing_oneof() && one_in(2)) continue;
      std::uint64_t count = field->is_repeated() ? below(3) : 1;
      if (field->is_repeated() && hostile && one_in(50)) count = 300;
      for (std::uint64_t j = 0; j < count; ++j) {
        fill(field->is_repeated() ? *reflection.AddMessage(&message, field)
                                  : *reflection.MutableMessage(&message, field),
             hostile);
      }
    } else if (field->is_repeated()) {  // numbers
      const bool is_integer = field->cpp_type() == FieldDescriptor::CPPTYPE_INT32;
      for (std::uint64_t j = below(3); j > 0; --j) {
        const auto number = static_cast<std::int32_t>(below(9)) - (hostile ? 4 : 0);
        if (is_integer) reflection.AddInt32(&message, field, number);
        if (!is_integer) reflection.AddFloat(&message, field, static_cast<float>(number) / 4);
      }
    } else {
      set(message, field, hostile && one_in(20));
    }
  }
}

void RandomConfig::set(Message& message, const FieldDescriptor* field, bool hostile) {
  const auto& reflection = *message.GetReflection();
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  static constexpr std::int64_t kNear[] = {0, 1, 1, 1, 2, 4, 8, 16, 32, 64, 256, 300, -1};
  static constexpr std::int64_t kFar[] = {kMax, -kMax - 1, 0x7fffffff, -0x7fffffff - 1,
                                          -1,   1048576,   1048577,    65536};
  static constexpr float kFarFloats[] = {std::numeric_limits<float>::infinity(),
                                         -std::numeric_limits<float>::infinity(),
                                         std::numeric_limits<float>::quiet_NaN(),
                                         std::numeric_limits<float>::denorm_min(),
                                         std::numeric_limits<float>::max(),
                                         -0.0f,
                                         1.0f};
  std::int64_t number = hostile ? kFar[below(std::size(kFar))] : kNear[below(std::size(kNear))];
  if (!hostile && field->options().GetExtension(configs::odd)) number |= 1;
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
      return reflection.SetInt32(&message, field, static_cast<std::int32_t>(number));
    case FieldDescriptor::CPPTYPE_INT64:
      return reflection.SetInt64(&message, field, number);
    case FieldDescriptor::CPPTYPE_UINT64:
      return reflection.SetUInt64(&message, field, random_());
    case FieldDescriptor::CPPTYPE_FLOAT:
      return reflection.SetFloat(&message, field,
                                 hostile ? kFarFloats[below(std::size(kFarFloats))]
                                         : static_cast<float>(random_()) / 2e19f);
    case FieldDescriptor::CPPTYPE_BOOL:
      return reflection.SetBool(&message, field, one_in(2));
    case FieldDescriptor::CPPTYPE_ENUM:
      return reflection.SetEnum(
          &message, field,
          field->enum_type()->value(static_cast<int>(below(field->enum_type()->value_count()))));
    case FieldDescriptor::CPPTYPE_STRING:
      return reflection.SetString(&message, field,
                                  hostile     ? hostile_text()
                                  : one_in(2) ? "valid"
                                              : "a \"b\" \\ \xc3\xbc");
    default:
      throw std::logic_error("a type the schema did not have: " + field->full_name());
  }
}

std::string RandomConfig::hostile_text() {
  switch (below(5)) {
    case 0:
      return "";
    case 1:
      return "line\nfeed\x01\x7f";
    case 2:
      return "\xff\xfe not UTF-8";
    case 3:
      return std::string(1 + below(100000), 'x');
    default:
      return "%s%n{}{0}${HOME}../../";
  }
}

std::string RandomConfig::setting() {
  std::string path;
  const Descriptor* message = configs::Config::descriptor();
  const FieldDescriptor* field = nullptr;
  while (message != nullptr) {
    field = message->field(static_cast<int>(below(message->field_count())));
    path += (path.empty() ? "" : ".") + field->name();
    if (field->is_repeated() && !one_in(5)) {
      path += one_in(20) ? ".-1" : fmt::format(".{}", below(3));
    }
    message = field->message_type();
    if (one_in(6)) break;
  }
  if (one_in(8)) path.insert(below(path.size() + 1), 1, static_cast<char>('.' + below(80)));
  if (one_in(8)) path.erase(below(path.size()), 1);
  std::string value;
  if (message != nullptr && !one_in(4)) {
    const std::unique_ptr<Message> drawn(
        google::protobuf::MessageFactory::generated_factory()->GetPrototype(message)->New());
    fill(*drawn, one_in(4));
    value = "{ " + drawn->ShortDebugString() + " }";
    if (field->is_repeated() && one_in(2)) value = "[" + value + ", {}]";
  } else if (field->enum_type() != nullptr && !one_in(4)) {
    value = field->enum_type()
                ->value(static_cast<int>(below(field->enum_type()->value_count())))
                ->name();
  } else {
    static const std::vector<std::string> kValues = {
        "1", "2",  "4",    "0.5", "true", "false", "valid", "test", "-1",  "0",         "1e400",
        "",  "{}", "[{}]", "{",   "[",    "\"",    "nan",   "0x10", "'a'", "1 steps: 2"};
    value = one_in(20) ? hostile_text() : kValues[below(kValues.size())];
  }
  return one_in(50) ? path : path + "=" + value;
}

std::string RandomConfig::damaged(std::string text) {
  static const std::string kCharacters = "{}[]<>:;,\"'#-.0\\x \n\t\xff\x01e";
  static const std::vector<std::string> kTokens = {
      "nan", "inf", "-1", "99999999999999999999", "1e400", "true", "{}", "{", "}", "0x", "\"", "'"};
  for (std::uint64_t n = 1 + below(3); n > 0; --n) {
    const std::size_t at = below(text.size() + 1);
    const std::size_t length = std::min<std::size_t>(1 + below(12), text.size() - at);
    const std::size_t line = text.rfind('\n', at) + 1;  // npos + 1 is 0
    const std::size_t line_end = std::min(text.find('\n', line), text.size());
    switch (below(7)) {
      case 0:
        text.erase(at, length);
        break;
      case 1:
        text.insert(at, 1, kCharacters[below(kCharacters.size())]);
        break;
      case 2:
        text.insert(at, text.substr(below(text.size() + 1), length));
        break;
      case 3:
        text.erase(line, line_end - line);
        break;
      case 4:
        text.insert(below(text.size() + 1), text.substr(line, line_end - line) + "\n");
        break;
      case 5: {  // the number or word at this place
        const auto is_word = [&](std::size_t i) {
          return i < text.size() && (std::isalnum(static_cast<unsigned char>(text[i])) != 0 ||
                                     text[i] == '_' || text[i] == '.');
        };
        std::size_t begin = at, end = at;
        while (begin > 0 && is_word(begin - 1)) --begin;
        while (is_word(end)) ++end;
        text.replace(begin, end - begin, kTokens[below(kTokens.size())]);
        break;
      }
      default:
        if (at < text.size()) text[at] ^= static_cast<char>(1 << below(8));
    }
  }
  return text;
}

void make_consistent(configs::Config& config) {
  if (config.task().kind_case() == configs::Task::KIND_NOT_SET) {
    config.mutable_task()->mutable_language_model();
  }
  config.clear_mesh();
  config.mutable_evaluate()->set_split("test");
  if (config.evaluate().every() == 0) config.mutable_evaluate()->clear_patience();
  auto& task = *config.mutable_task();
  // Lists of another length than the number of classes.
  if (task.has_image_classification()) task.mutable_image_classification()->clear_class_weight();
  if (task.has_point_sets()) task.mutable_point_sets()->clear_class_weight();
  if (task.has_classification()) {
    auto& classification = *task.mutable_classification();
    classification.clear_class_weight();
    if (classification.second_stream() == classification.stream())
      classification.clear_second_stream();
  }
  config.mutable_watchdog()->clear_steps();  // few random numbers are in these ranges
  config.mutable_watchdog()->clear_patient_seconds();
  config.mutable_data()->set_sequence_length(256);
  if (config.train().optimizer().has_adafactor()) config.mutable_train()->clear_zero();
  config.clear_device();
  config.mutable_train()->mutable_schedule()->clear_decay_epoch();
  if (config.train().schedule().shape() == configs::Schedule::step_decay) {
    config.mutable_train()->mutable_schedule()->add_decay_epoch(3);
  }
  auto& model = *config.mutable_model();
  model.set_heads(4);
  model.set_channels(64);
  model.set_layers(std::clamp(model.layers(), 0, 4));
  if (model.attention_only()) {
    model.clear_feed_forward();
    model.clear_activation();
    model.mutable_dropout()->clear_activation();
  }
  const auto share_heads = [](auto& attentions) {
    for (auto& attention : attentions) {
      for (auto& group : *attention.mutable_group()) group.set_heads(1);
      if (attention.group_size() > 0) attention.mutable_group(0)->clear_heads();
    }
  };
  share_heads(*model.mutable_attention());
  for (auto& attention : *model.mutable_attention()) {
    for (auto& group : *attention.mutable_group()) {
      const FieldDescriptor* kind = chosen_member(group.mechanism());
      if (kind != nullptr && is_causal(config.task()) &&
          kind->message_type()->options().HasExtension(configs::encoder_only)) {
        group.clear_mechanism();
      }
    }
  }
  if (!config.task().has_translation()) {
    model.clear_encoder();
  } else if (model.has_encoder()) {
    auto& encoder = *model.mutable_encoder();
    encoder.set_layers(std::clamp(encoder.layers(), 0, 4));
    share_heads(*encoder.mutable_attention());
    share_heads(*encoder.mutable_cross_attention());
  }
  if (config.task().has_translation()) {  // blocks would have to divide it
    config.mutable_task()->mutable_translation()->clear_target_length();
  }
}

}  // namespace birkhoff
