// Random configs and random damage to texts: accepted and exact, or refused in one line; never a
// crash.
#include <gmock/gmock.h>
#include <rapidcheck.h>

#include <random>

#include "helpers.h"

namespace birkhoff {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

// Sets fields at random, to values inside or near their ranges.
class RandomConfig {
 public:
  explicit RandomConfig(std::uint64_t seed) : random_(seed) {}

  void fill(Message& message) {
    const auto& reflection = *message.GetReflection();
    for (int i = 0; i < message.GetDescriptor()->field_count(); ++i) {
      const FieldDescriptor* field = message.GetDescriptor()->field(i);
      if (field->name() == "include" || below(3) == 0) continue;
      if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
        if (field->real_containing_oneof() && below(2) == 0) continue;
        const std::uint64_t count = field->is_repeated() ? below(3) : 1;
        for (std::uint64_t j = 0; j < count; ++j) {
          fill(field->is_repeated() ? *reflection.AddMessage(&message, field)
                                    : *reflection.MutableMessage(&message, field));
        }
      } else {
        set(message, field);
      }
    }
  }

  std::uint64_t below(std::uint64_t end) { return random_() % end; }

 private:
  void set(Message& message, const FieldDescriptor* field) {
    const auto& reflection = *message.GetReflection();
    static constexpr std::int64_t kNumbers[] = {0, 1, 1, 1, 2, 4, 8, 16, 32, 64, 256, 300, -1};
    const std::int64_t number = kNumbers[below(std::size(kNumbers))];
    switch (field->cpp_type()) {
      case FieldDescriptor::CPPTYPE_INT32:
        return reflection.SetInt32(&message, field, static_cast<int>(number));
      case FieldDescriptor::CPPTYPE_INT64:
        return reflection.SetInt64(&message, field, number);
      case FieldDescriptor::CPPTYPE_UINT64:
        return reflection.SetUInt64(&message, field, random_());
      case FieldDescriptor::CPPTYPE_FLOAT:
        return reflection.SetFloat(&message, field, static_cast<float>(random_()) / 2e19f);
      case FieldDescriptor::CPPTYPE_BOOL:
        return reflection.SetBool(&message, field, below(2) == 0);
      case FieldDescriptor::CPPTYPE_ENUM:
        return reflection.SetEnum(
            &message, field,
            field->enum_type()->value(static_cast<int>(below(field->enum_type()->value_count()))));
      case FieldDescriptor::CPPTYPE_STRING:
        return reflection.SetString(&message, field,
                                    below(2) == 0 ? "valid" : "a \"b\" \\ \xc3\xbc");
      default:
        FAIL() << "a type the schema did not have: " << field->full_name();
    }
  }

  std::mt19937_64 random_;
};

// Makes most random configs valid, so that what is accepted is tested too.
void make_consistent(configs::Config& config) {
  if (config.task().kind_case() == configs::Task::KIND_NOT_SET) {
    config.mutable_task()->mutable_language_model();
  }
  config.clear_mesh();
  config.mutable_evaluate()->set_split("test");
  config.mutable_data()->set_sequence_length(256);
  auto& model = *config.mutable_model();
  model.set_heads(4);
  model.set_channels(64);
  for (auto& attention : *model.mutable_attention()) {
    for (auto& group : *attention.mutable_group()) group.set_heads(1);
    if (attention.group_size() > 0) attention.mutable_group(0)->clear_heads();
  }
}

// "text:..." and at most this long.
void expect_refusal(const std::string& what) {
  EXPECT_THAT(what, testing::StartsWith("text:"));
  EXPECT_LT(what.size(), 500u);
}

void expect_exact(const configs::Config& config) {
  const std::string text = config_text(config);
  const configs::Config again = parse_config(text, "text", {});
  EXPECT_EQ(config_text(again), text);  // resolving twice changes nothing
  EXPECT_TRUE(equal(again, config));
  EXPECT_TRUE(diff_configs(config, again).empty());
}

TEST(RandomConfig, IsExactOrRefusedInOneLine) {
  int num_accepted = 0, num_refused = 0;
  rc::check([&](std::uint64_t seed) {
    RandomConfig random(seed);
    configs::Config config;
    random.fill(config);
    if (random.below(4) != 0) make_consistent(config);
    try {
      const configs::Config resolved = parse_config(config_text(config), "text", {});
      num_accepted += 1;
      expect_exact(resolved);
    } catch (const Error& error) {
      num_refused += 1;
      RC_ASSERT(error.code() == ExitCode::kConfig);
      expect_refusal(error.what());
    }
    RC_ASSERT(!testing::Test::HasFailure());
  });
  std::mt19937_64 seeds(7);
  for (int i = 0; i < 2000; ++i) {
    RandomConfig random(seeds());
    configs::Config config;
    random.fill(config);
    make_consistent(config);
    try {
      expect_exact(parse_config(config_text(config), "text", {}));
      num_accepted += 1;
    } catch (const Error& error) {
      num_refused += 1;
      expect_refusal(error.what());
    }
  }
  EXPECT_GT(num_accepted, 20);
  EXPECT_GT(num_refused, 20);
}

TEST(DamagedText, IsAcceptedOrRefusedInOneLine) {
  const std::string text = config_text(
      parse("model { attention { group { heads: 1 mechanism { sinkhorn {} } } group {} } }"));
  const std::string alphabet =
      "{}[]<>:;,\"'#-.0\\x \n\t\xff"
      "e";
  std::mt19937_64 random(11);
  const auto below = [&](std::size_t end) { return random() % end; };
  int num_refused = 0;
  for (int i = 0; i < 5000; ++i) {
    std::string damaged = text;
    for (std::size_t n = 1 + below(3); n > 0; --n) {
      const std::size_t at = below(damaged.size());
      const std::size_t length = std::min<std::size_t>(1 + below(12), damaged.size() - at);
      switch (below(4)) {
        case 0:
          damaged.erase(at, length);
          break;
        case 1:
          damaged.insert(at, 1, alphabet[below(alphabet.size())]);
          break;
        case 2:
          damaged.insert(at, damaged.substr(below(damaged.size()), length));
          break;
        case 3:
          damaged[at] = alphabet[below(alphabet.size())];
          break;
      }
    }
    try {
      expect_exact(parse_config(damaged, "text", {}));
    } catch (const Error& error) {
      num_refused += 1;
      EXPECT_EQ(error.code(), ExitCode::kConfig) << damaged;
      expect_refusal(error.what());
    }
    ASSERT_FALSE(HasFailure()) << damaged;
  }
  EXPECT_GT(num_refused, 2000);
}

}  // namespace
}  // namespace birkhoff
